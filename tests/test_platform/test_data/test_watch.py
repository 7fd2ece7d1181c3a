"""Watch exercises: the windows of each subject, cut in time, from a pickle that is not run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import narrowcast as nc
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.data.watch import WatchExercises, read_recordings
from narrowcast.platform.errors import UserError
from watch_set import HEADER, SUBJECTS, recordings, watch_file


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file among the data sets."""
    path = tmp_path / "watch-exercises" / "watch_dataset.npy"
    path.parent.mkdir()
    path.write_bytes(watch_file())
    monkeypatch.setenv("NARROWCAST_DATA", str(tmp_path))
    return path


def test_recordings_are_those_that_numpy_reads(place: Path) -> None:
    found, expected = read_recordings(place), recordings()
    for got, wanted in zip(found.sensors, expected["X"], strict=True):
        np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(found.classes, expected["y"])
    np.testing.assert_array_equal(found.subjects, expected["subject"])


def _windows(length: int, part: int, *, window: int, stride: int) -> list[int]:
    """Return the starts of the windows of a recording in a part, counted one by one."""
    test = length - int(0.2 * length)
    train = test - int(0.25 * test)
    begin, end = ((0, train), (train, test), (test, length))[part]
    return [start for start in range(begin, end, stride) if start + window <= end]


@pytest.mark.usefixtures("place")
def test_windows_are_those_of_a_loop_and_do_not_cross_a_cut() -> None:
    data = WatchExercises(window=10, stride=4, validation_share=0.25).load()
    raw = recordings()
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for part in range(3):
        rows = [
            (values[start : start + 10].T, kind, subject - 1)
            for values, kind, subject in zip(raw["X"], raw["y"], raw["subject"], strict=True)
            for start in _windows(len(values), part, window=10, stride=4)
        ]
        parts.append(tuple(np.array(column) for column in zip(*rows, strict=True)))  # type: ignore[arg-type]
    train = parts[0][0]
    mean, scale = train.mean(axis=(0, 2), keepdims=True), train.std(axis=(0, 2), keepdims=True)
    for got, (features, labels, _) in zip((data.train, data.validation, data.test), parts, strict=True):
        np.testing.assert_allclose(got.features, (features - mean) / scale, atol=1e-6)
        np.testing.assert_array_equal(got.labels, labels)
    np.testing.assert_array_equal(np.diff(data.indptr), np.bincount(parts[0][2]))
    for client in range(SUBJECTS):
        of_client = data.order[data.indptr[client] : data.indptr[client + 1]]
        assert (parts[0][2][of_client] == client).all()
    np.testing.assert_array_equal(data.held_out_users["test"], parts[2][2])


@pytest.mark.usefixtures("place")
def test_some_subjects_are_drawn_by_the_seed_and_other_partitions_deal_all_windows() -> None:
    def loaded(**fields: Any) -> Samples:
        return WatchExercises(window=10, **fields).load()

    everyone, two = loaded(), loaded(clients=2, seed=1)
    assert (everyone.n_clients, two.n_clients) == (3, 2)
    assert len(two.train) < len(everyone.train)
    assert loaded(partition={"kind": "iid"}, clients=5).n_clients == 5
    with pytest.raises(UserError, match="has 3 subjects, but 4 clients are requested; lower clients"):
        loaded(clients=4)
    with pytest.raises(UserError, match="no recording has a window of 100 readings"):
        WatchExercises().load()


@pytest.mark.usefixtures("place")
def test_a_run_learns_the_exercises_of_each_subject() -> None:
    overrides = {"data": {"kind": "watch-exercises", "window": 10}, "clients_per_round": 3, "rounds": 20}
    *_, last = nc.rounds("fedavg-digits", overrides, backend="local")
    assert last.metrics["test.accuracy"] > 0.8


class _Command:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, ("touch planted",)


def _changed(**changes: Any) -> bytes:
    return watch_file({**recordings(), **changes})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (watch_file({"X": _Command()}), "names posix.system"),
        (HEADER, "has no end"),
        (b"PK" + watch_file(), "does not begin as its kind of file does"),
        (watch_file([1]), "list indices"),
        (_changed(X=[np.zeros((90, 5)) for _ in range(12)]), "a recording has not 6 sensors"),
        (_changed(X=[np.full((90, 6), np.nan)] * 12), "more readings than bytes"),
        (_changed(X=[np.full((90, 6), np.nan) for _ in range(12)]), "has a reading that is not finite"),
        (_changed(y=np.arange(12)), "has a class that is not one of 0 to 1"),
        (_changed(y=np.arange(3)), "has 12 recordings, but not a class and a subject of each"),
        (_changed(X=[]), "has 0 recordings"),
    ],
)
def test_a_bad_file_is_one_line_and_runs_nothing(
    content: bytes, message: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_recordings(place)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("download the file again")
    assert not (tmp_path / "planted").exists()


@pytest.mark.data("watch-exercises")
def test_the_data_of_the_study_have_ten_subjects_with_all_seven_exercises() -> None:
    data = WatchExercises().load()
    assert (data.n_clients, data.n_classes, data.train.features.shape[1:]) == (10, 7, (6, 100))
    for client in range(10):
        rows = data.order[data.indptr[client] : data.indptr[client + 1]]
        assert len(np.unique(data.train.labels[rows])) == 7
