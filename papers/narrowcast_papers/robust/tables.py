"""The matrices: rules under attack, one with images of the server's own, backdoors, and codecs under attack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from narrowcast_papers.robust.matrix import ATTACKERS, CLIENTS, MNIST, NONE, ROUNDS, SPLITS, Matrix, Settings

FEDAVG: Mapping[str, Any] = {"kind": "fedavg", "weights": "equal"}
_KRUM: Mapping[str, Any] = {"kind": "krum", "byzantine": ATTACKERS}
_TRIMMED: Mapping[str, Any] = {"kind": "trimmed_mean", "share": ATTACKERS / CLIENTS}
_MEDIAN: Mapping[str, Any] = {"kind": "geometric_median", "iterations": 4}


def _by(rule: Mapping[str, Any], *, mixed: bool = False) -> Mapping[str, Any]:
    """Return FedAvg with a rule, after the mixing of nearest neighbours if it is `mixed`."""
    return {**FEDAVG, "aggregator": {"kind": "nnm", "byzantine": ATTACKERS, "rule": rule} if mixed else rule}


def _coded(*stages: Mapping[str, Any] | str) -> Mapping[str, Any]:
    return {**FEDAVG, "codec": list(stages)}


RULES: Settings = {
    "mean": FEDAVG,
    "median": _by({"kind": "median"}),
    "trimmed mean": _by(_TRIMMED),
    "geometric median": _by(_MEDIAN),
    "Krum": _by(_KRUM),
    "multi-Krum": _by({**_KRUM, "selected": CLIENTS - ATTACKERS}),
    "Bulyan": _by({"kind": "bulyan", "byzantine": ATTACKERS}),
    "norm clip": _by({"kind": "norm_clip", "radius": "median"}),
    "centred clip": _by({"kind": "centred_clip", "radius": "median"}),
    "bucketing, median": _by({"kind": "bucketing", "size": 2, "rule": {"kind": "median"}}),
    "NNM, trimmed mean": _by(_TRIMMED, mixed=True),
    "NNM, geometric median": _by(_MEDIAN, mixed=True),
    "NNM, Krum": _by(_KRUM, mixed=True),
}
ATTACKS: Settings = {
    NONE: {},
    "label flip": {"kind": "label_flip"},
    "-mean": {"kind": "inner_product", "scale": 1.0},
    "omniscient": {"kind": "omniscient"},
    "ALIE, z 1.5": {"kind": "alie", "z": 1.5},
    "-mean / 2": {"kind": "inner_product", "scale": 0.5},
    "-2 mean": {"kind": "inner_product", "scale": 2.0},
    "min-max": {"kind": "min_max"},
    "mimic": {"kind": "mimic"},
}
CODECS: Settings = {
    "float32": FEDAVG,
    "8 bits": _coded({"kind": "quantise", "levels": 127}),
    "4 bits": _coded({"kind": "quantise", "levels": 7}),
    "2 bits": _coded({"kind": "quantise", "levels": 1}),
    "Top-K 1 %": _coded("error_feedback", {"kind": "top_k", "fraction": 0.01}),
    "SVD, rank 1": _coded("error_feedback", {"kind": "svd", "rank": 1}),
    "SCoLR, rank 4": {"kind": "scolr", "rank": 4, "rank_policy": "uniform", "aggregation": "per_component_mean"},
}
THROUGH_CODECS: Settings = {
    NONE: {},
    "omniscient": ATTACKS["omniscient"],
    "-2 mean": ATTACKS["-2 mean"],
    "min-max": ATTACKS["min-max"],
    "trigger": {"kind": "trigger", "target": 2},
    "trigger, replacement": {"kind": "trigger", "target": 2, "factor": None, "first_round": 30},
}
"""The last one is an attack in the last round alone."""
_TRIGGER: Mapping[str, Any] = {"kind": "trigger", "target": 2}
_UNTOUCHED: Mapping[str, Any] = {**_TRIGGER, "first_round": ROUNDS + 1}
"""Nobody attacks, and success is what the model errs."""
_REPLACED: Mapping[str, Any] = {**_TRIGGER, "factor": None, "every": 1000}
BACKDOORS: Settings = {
    NONE: _UNTOUCHED,
    "trigger, 1 attacker": {**_TRIGGER, "attackers": 1},
    "trigger, 4 attackers": _TRIGGER,
    "DBA, 4 attackers": {**_TRIGGER, "distributed": True},
    "replacement, last round": {**_REPLACED, "attackers": 1, "first_round": 30},
    "replacement, 10 rounds before": {**_REPLACED, "attackers": 1, "first_round": 20},
    "DBA, replacement, last round": {**_REPLACED, "distributed": True, "first_round": 30},
}
"""Four attackers with a bar each brighten as many pixels as one with the whole trigger."""
DEFENCES = {
    **{
        name: RULES[name]
        for name in ("mean", "median", "geometric median", "Krum", "multi-Krum", "norm clip", "NNM, geometric median")
    },
    "norm clip, noise": _by({"kind": "norm_clip", "radius": "median", "noise": 0.025}),
}

TURNS = (10, 20, 27, 29, 30)
_SERVER_FREE: Mapping[str, Any] = {"kind": "server_free", "weights": "equal"}
ELECTED: Settings = {"mean": _SERVER_FREE, "norm clip": {**_SERVER_FREE, "aggregator": {"kind": "norm_clip"}}}


def _in_turn(turn: int, **fields: Any) -> Mapping[str, Any]:
    """Return the attack, in one round, of the client that serves in it."""
    return {**_REPLACED, "attackers": [(turn - 1) % CLIENTS], "first_round": turn, **fields}


SERVERS: Settings = {
    NONE: _UNTOUCHED,
    **{f"server of round {turn}": _in_turn(turn, factor=1.0, serving="alone") for turn in TURNS},
    "client in round 30": _in_turn(30, factor=1.0),
    "replacement in round 30": _in_turn(30),
}
"""The last two attack in the same round as the last server, as a client: its own change, and that which replaces."""

TRUSTED: Settings = {
    "mean": FEDAVG,
    "geometric median": RULES["geometric median"],
    "norm clip": RULES["norm clip"],
    "FLTrust": _by({"kind": "fltrust"}),
}
"""Rules on clients that lack the 100 images of the server, from which FLTrust alone learns."""

PERCEPTRON = replace(MNIST, model={"kind": "mlp", "hidden": [64]})

ROBUST = Matrix(
    "Test accuracy (%) of 13 rules under eight attacks, 4 of 20 clients attack",
    "robust-mnist.csv",
    tuple(SPLITS),
    RULES,
    ATTACKS,
    "mean",
).table
TRUST = Matrix(
    "Test accuracy (%) where the server has 100 images of its own, 4 of 20 clients attack",
    "fltrust-mnist.csv",
    ("Dirichlet 0.3",),
    TRUSTED,
    ATTACKS,
    "mean",
    setting=replace(MNIST, server=100),
).table
COMPRESSED = Matrix(
    "Test accuracy (%) of FedAvg by codec under attack, 4 of 20 clients attack",
    "attacked-codecs.csv",
    ("Dirichlet 0.3",),
    CODECS,
    THROUGH_CODECS,
    "float32",
    ("success", "megabytes"),
).table
BACKDOOR = Matrix(
    "Success (%) of backdoors by rule: test images of other classes with the trigger that are seen as its class",
    "backdoor-mnist.csv",
    ("Dirichlet 0.3",),
    DEFENCES,
    BACKDOORS,
    "mean",
    ("success",),
    judged="success",
    setting=PERCEPTRON,
).table
ELECTED_SERVER = Matrix(
    "Success (%) of the trigger of an elected server after 30 rounds, by the round in which it serves",
    "elected-mnist.csv",
    ("Dirichlet 0.3",),
    ELECTED,
    SERVERS,
    "mean",
    ("success",),
    judged="success",
    setting=PERCEPTRON,
).table
