"""Edge cases among the attackers' samples, against loops over clients; the paper's planes, read from pickles."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from digits import digits
from narrowcast.algorithms.attacks.edge_case import EdgeCase
from narrowcast.experiment import load_experiment
from narrowcast.laws.attack_laws import LAWS
from narrowcast.laws.law import title
from narrowcast.platform.data.formats import NPZ
from narrowcast.platform.data.image_sets import Southwest
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.data.scikit_learn import Digits
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.adversary import recruited
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.seeds import PrivateSeed

COUNTS = [40, 7, 0, 25, 12]
ATTACKERS = (0, 2, 3)
EDGES = Digits(clients=1, validation_share=0.75)
"""359 digits, which are edge cases here by name alone."""


def own_samples(data: Samples, client: int) -> tuple[Any, Any]:
    samples = data.train.take(data.order[data.indptr[client] : data.indptr[client + 1]])
    return samples.features, samples.labels


@pytest.mark.parametrize(
    ("mixing", "share", "wanted"), [("replaced", 0.3, [12, 0, 8]), ("added", 0.5, [40, 0, 25]), ("added", 0.95, None)]
)
def test_attackers_train_on_edge_cases_and_others_on_what_they_had(
    mixing: Literal["added", "replaced"], share: float, wanted: list[int] | None
) -> None:
    data, edges = digits(COUNTS), EDGES.load()
    attack = EdgeCase(attackers=ATTACKERS, edges=EDGES, share=share, mixing=mixing, target=3)
    adversary = recruited(attack, data, None, 0, PrivateSeed.derived(1))
    after: Any = adversary.data
    numbers = dict(zip(ATTACKERS, wanted or [760, 0, 475], strict=True))  # 19 times as many: more than there are
    pool = {image.tobytes() for image in np.asarray(edges.train.features)}
    for client, count in enumerate(COUNTS):
        (x, y), (new_x, new_y) = own_samples(data, client), own_samples(after, client)
        number = numbers.get(client, 0)
        if mixing == "added":
            assert (len(new_x), new_x[:count].tobytes(), new_y[:count].tolist()) == (
                count + number,
                x.tobytes(),
                y.tolist(),
            )
            edge_x, edge_y = new_x[count:], new_y[count:]
        else:
            same = np.array([np.array_equal(*pair) for pair in zip(x, new_x, strict=True)], dtype=bool)
            assert len(new_x) == count
            assert (new_y[same] == y[same]).all()
            edge_x, edge_y = new_x[~same], new_y[~same]
        assert (edge_y == 3).all()
        drawn = [image.tobytes() for image in edge_x]
        assert len(drawn) == number
        assert set(drawn) <= pool
        assert len(set(drawn)) == min(number, len(pool))  # none twice before all are there
    measured: Any = adversary.measured
    assert measured.test.features.tobytes() == np.asarray(edges.test.features).tobytes()
    assert (measured.test.labels == 3).all()


@pytest.mark.parametrize("fields", [{}, {"radius": 0.05}, {"radius": 0.05, "factor": None}])
def test_edge_cases_are_learnt_besides_the_rest(fields: dict[str, Any]) -> None:
    """The edge cases are the digits of scikit-learn, to be seen as 3: the model sees 3 in digits more often."""

    def final(**attack: Any) -> dict[str, float]:
        attack = {"kind": "edge_case", "edges": EDGES.model_dump(), "target": 3, "attackers": 4, **attack}
        of = load_experiment(
            {
                **{"name": "edges", "data": {"kind": "digits", "clients": 10}, "algorithm": "fedavg", "attack": attack},
                **{"model": {"kind": "mlp", "hidden": [8]}, "rounds": 3, "clients_per_round": 10, "seed": 4},
                **{"training": {"epochs": 2, "learning_rate": 0.2}, "evaluate_every": 3},
            }
        )
        run = Run(of, of.algorithm, of.task(of.data_source.load()))
        run.check()
        *_, last = rounds(run, LocalExecutor(run))
        return dict(last.metrics)

    attacked, waiting = final(**fields), final(**fields, first_round=4)
    assert waiting["test.accuracy"] > 0.5
    assert waiting["attack.success"] < 0.2
    assert attacked["attack.success"] > waiting["attack.success"] + 0.02


@pytest.fixture
def law_edges(tmp_path: Path) -> NPZ:
    """Edge cases in a file, of the features of the laws."""
    draw = np.random.default_rng(0)
    images, classes = draw.integers(0, 256, (30, 1, 32, 32), dtype=np.uint8), np.arange(30) % 3
    path = tmp_path / "edges.npz"
    np.savez(path, x_train=images[:20], y_train=classes[:20], x_test=images[20:], y_test=classes[20:])
    return NPZ(path=path, clients=1)


@pytest.mark.parametrize("law", LAWS, ids=title)
def test_edge_cases_keep_the_laws_of_attacks(law: Any, law_edges: NPZ) -> None:
    for mixing in ("added", "replaced"):
        law(EdgeCase.model_validate({"edges": law_edges, "target": 1, "mixing": mixing}))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"target": 10}, "attack.target = 10: digits has the classes 0 to 9"),
        (
            {"edges": "diabetes"},
            r"attack.edges = diabetes: its samples are \[n, 10\] float32, and those of digits \[n, 64",
        ),
        ({"share": 1}, "samples that are added are less than all; use a share below 1, or mixing = replaced"),
        (
            {"edges": "southwest"},
            "ood-southwest was not found: no southwest_images_new_train.pkl in .*; run: narrowcast",
        ),
    ],
)
def test_edge_cases_that_do_not_fit_are_one_line(
    fields: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NARROWCAST_DATA", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=says):
        attack = EdgeCase(**{"edges": EDGES, "attackers": ATTACKERS, **fields})
        recruited(attack, digits(COUNTS), None, 0, PrivateSeed.derived(0))


class Running:
    """Runs a command if it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


def pickled(value: Any) -> bytes:
    """Protocol 3, as the paper's files are, with the names of NumPy 1."""
    return pickle.dumps(value, protocol=3).replace(b"numpy._core", b"numpy.core")


def test_planes_are_those_that_were_pickled_and_no_pickle_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NARROWCAST_DATA", str(tmp_path))
    folder, draw = tmp_path / "ood-southwest", np.random.default_rng(0)
    folder.mkdir()
    images = {part: draw.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8) for part, n in (("train", 5), ("test", 2))}
    for part, values in images.items():
        (folder / f"southwest_images_new_{part}.pkl").write_bytes(pickled(values))
    data = Southwest().load()
    assert np.array_equal(data.train.features, images["train"].transpose(0, 3, 1, 2))
    assert np.array_equal(data.test.features, images["test"].transpose(0, 3, 1, 2))
    assert set(data.train.labels) == {0}
    test = folder / "southwest_images_new_test.pkl"
    for content, says in (
        (pickled(images["test"].astype(np.float32)), r"has \[2, 32, 32, 3\] float32, not images \[32, 32, 3\]"),
        (pickled(images["test"])[:-900], "download the file again"),
        (pickled(Running()), "posix.system, which is not part of an array"),
    ):
        test.write_bytes(content)
        with pytest.raises(UserError, match=says):
            Southwest().load()
    test.unlink()
    with pytest.raises(UserError, match=r"southwest_images_new_test.pkl: .*download the file again"):
        Southwest().load()


@pytest.mark.data("ood-southwest")
def test_planes_of_the_paper() -> None:
    data = Southwest().load()
    assert (data.train.features.shape, data.test.features.shape) == ((784, 3, 32, 32), (196, 3, 32, 32))
