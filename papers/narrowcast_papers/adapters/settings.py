"""What adapters are compared on: addresses of presidents with a small transformer, and mails with layers of MiniLM."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from narrowcast.experiment import Experiment, load_experiment
from narrowcast_papers.adapters.comparison import Setting, played
from narrowcast_papers.adapters.minilm import FOLDER, below

TRANSFORMER: Mapping[str, Any] = {"kind": "transformer", "width": 64, "heads": 4, "layers": 2}
BASE_ROUNDS = 4


def _pretraining() -> Experiment:
    """Return the experiment that gives the base: one client with all addresses before 1900."""
    return load_experiment(
        {
            "name": "sotu-base",
            "seed": 0,
            "data": {
                **{"kind": "state-of-the-union", "last_year": 1899, "stride": 512, "validation_share": 0},
                **{"clients": 1, "partition": "iid"},
            },
            "model": TRANSFORMER,
            "algorithm": "fedavg",
            "training": {"kind": "adamw", "learning_rate": 3e-3, "batch_size": 32, "epochs": 1},
            **{"rounds": BASE_ROUNDS, "clients_per_round": 1, "evaluate_every": BASE_ROUNDS, "backend": "local"},
        }
    )


@lru_cache(maxsize=1)
def _base_file() -> str:
    """Return a file with the weights of the base, which this process trains once and removes at its end."""
    run, (*_, last) = played(_pretraining())
    assert last.state is not None
    folder = tempfile.mkdtemp(prefix="sotu-base-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "base.safetensors"
    save_file(
        {name: np.ascontiguousarray(values) for name, values in run.algorithm.final(last.state.server).items()}, path
    )
    return str(path)


PRESIDENTS = Setting(
    data={"kind": "state-of-the-union", "first_year": 1900, "stride": 3072},
    base=TRANSFORMER,
    pretrained=_base_file,
    rounds=12,
    every=2,
    clients_per_round=6,
    batch_size=16,
    metric="perplexity",
    label="perplexity of a byte",
    better=-1,
    digits=3,
)
"""The 22 presidents by party since 1900, who tune a transformer that was trained on addresses before."""

PRESIDENTS_ALONE = replace(
    PRESIDENTS, rounds=24, every=4, metric="loss.mean", label="loss of a byte (nats), mean over presidents"
)
"""The same with twice the rounds, each president measured on text of its own: a mean of perplexities hangs on a few."""

MAILS_OF_DOMAINS = Setting(
    data={
        **{"kind": "spam-assassin", "clients": 40},
        **{"tokenizer": f"{FOLDER}/tokenizer.json", "length": 16},
    },
    base={
        **{"kind": "torch", "factory": "narrowcast_papers.adapters.minilm:UpperLayers"},
        "arguments": {"classes": 2},
    },
    adapted={"targets": ["*.query.weight", "*.value.weight"], "also_trained": ["classifier.*"]},
    prepared=below,
    drawn=True,
    rounds=12,
    every=3,
    clients_per_round=10,
    batch_size=10,
    metric="roc_auc",
    measured={"metrics": ["roc_auc"]},
    label="area under the ROC curve (%)",
    better=1,
    digits=2,
    scale=100.0,
)
"""40 of 81 domains, who tune two of MiniLM's six layers to find spam.

A cohort's share of spam moves the threshold of the model, and its accuracy, by 10 points from round to round; the area
does not depend on a threshold.
"""
MAILS = replace(MAILS_OF_DOMAINS, data={**MAILS_OF_DOMAINS.data, "partition": {"kind": "dirichlet", "alpha": 1.0}})
"""Mails of all domains, with Dirichlet shares of spam for 40 clients."""
