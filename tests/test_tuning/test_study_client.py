"""The study client on Optuna's storages, with made-up evaluations."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState
from pydantic import TypeAdapter

from narrowcast.platform.errors import UserError
from narrowcast.tuning.client import ProposedTrial, StudyClient
from narrowcast.tuning.pruning import LearningCurve
from narrowcast.tuning.settings import StudySettings, trial_metrics
from narrowcast.tuning.space import Dimension, Space
from narrowcast.tuning.storage import open_storage
from narrowcast.tuning.trials import DISCARDED, OWNER, SURPLUS, trial_records
from sampling import sampled

SPACE = {
    "rate": {"kind": "float", "low": 0.01, "high": 1, "log": True},
    "rank": {"kind": "int", "low": 1, "high": 8},
    "kind": ["plain", "coded"],
    "bits": {"kind": "choice", "values": [2, 4], "when": {"kind": "coded"}},
}
ONE: dict[str, Any] = {"objectives": {"validation.accuracy": "maximize"}, "trials": 14}
TWO: dict[str, Any] = {**ONE, "objectives": {"validation.accuracy": "maximize", "uplink_bits": "minimize"}}


def space(dimensions: dict[str, Any] | None = None) -> Space:
    return Space(TypeAdapter(dict[str, Dimension]).validate_python(dimensions or SPACE))


def client(path: Path, settings: dict[str, Any], dimensions: dict[str, Any] | None = None) -> StudyClient:
    return StudyClient("s", open_storage(str(path), 5), StudySettings(**settings), space(dimensions), "digest")


def row(round_index: int, accuracy: float, bits: float = 100.0) -> dict[str, Any]:
    uplink, downlink = round_index * bits, 1
    spent = {"total_uplink_bits": uplink, "total_downlink_bits": downlink, "total_bits": uplink + downlink}
    seconds = {"simulated_seconds": 10.0 * round_index}
    return {"round": round_index, "validation.accuracy": accuracy, **spent, **seconds}


def run(one: StudyClient, asked: ProposedTrial, rounds: int = 4) -> str:
    """Report and tell a trial whose accuracy and bits grow with its rank; return its state."""
    quality = asked.params["rank"] / 8
    for index in range(1, rounds + 1):
        now = row(index, quality * index / rounds, 100 * asked.params["rank"])
        if one.report(asked.number, now):
            return one.tell(asked.number, now, pruned=True)
    return one.tell(asked.number, now)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("sampler", ["tpe", "gp", "nsga2", "cma_es", "random"])
def test_every_sampler_proposes_the_same_twice_and_after_a_pause(tmp_path: Path, sampler: str) -> None:
    settings = {**ONE, "sampler": {"kind": sampler}}
    drawn: dict[str, list[dict[str, Any]]] = {}
    for name in ("whole", "paused"):
        drawn[name] = []
        one = client(tmp_path / name, settings)
        while (asked := one.ask()) is not None:
            drawn[name].append(asked.params)
            run(one, asked)
            if name == "paused":
                one = client(tmp_path / name, settings)
    assert drawn["whole"] == drawn["paused"]
    assert len(drawn["whole"]) == 14
    assert all(("bits" in each) == (each["kind"] == "coded") for each in drawn["whole"])
    assert len({each["rate"] for each in drawn["whole"][:10]}) == 10  # an estimate may propose a bound twice


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("same", [True, False])
def test_a_gaussian_process_sees_costs_by_their_logarithm(tmp_path: Path, same: bool) -> None:
    """Squaring a cost changes no proposal, since its logarithm is only doubled; shifting it does."""
    settings, drawn = {**TWO, "sampler": "gp"}, []
    for name in ("plain", "other"):
        one = client(tmp_path / name, settings)
        for _ in range(10):
            asked = one.ask()
            assert asked is not None
            quality, cost = asked.params["rate"] * asked.params["rank"], 10 ** (4 * asked.params["rate"])
            spent = cost if name == "plain" else cost**2 if same else cost + 1e6
            one.tell(asked.number, row(1, quality, spent))
        proposed = one.ask()
        assert proposed is not None
        drawn.append(proposed.params)
    assert (drawn[0]["rate"] == pytest.approx(drawn[1]["rate"], rel=1e-3)) == same


def test_two_processes_walk_a_grid_once(tmp_path: Path) -> None:
    grid = {name: SPACE[name] for name in ("rank", "kind", "bits")}
    settings = {**ONE, "trials": None, "sampler": "grid"}
    both = [client(tmp_path / "s", settings, grid) for _ in range(2)]
    assert both[0].n_trials == 8 * 3  # plain, and coded with two numbers of bits
    found = []
    while asked := [(one, trial) for one in both if (trial := one.ask()) is not None]:
        for one, trial in asked:
            found.append(tuple(sorted(trial.params.items())))
            run(one, trial)
    assert len(found) == len(set(found)) == 24
    assert sum(trial.state == TrialState.COMPLETE for trial in both[0].trials()) == 24


def test_the_trial_of_a_dead_worker_is_retried_once(tmp_path: Path) -> None:
    one = client(tmp_path / "s", {**ONE, "trials": 2})
    first = one.ask()
    assert first is not None
    one.worker_died(first.number, "gone")
    again = one.ask()
    assert again is not None
    assert (again.params, again.retry_of) == (first.params, first.number)
    one.worker_died(again.number, "gone")
    last = one.ask()
    assert last is not None
    assert last.retry_of is None
    run(one, last)
    assert one.ask() is None
    assert [trial.state.name for trial in one.trials()] == ["FAIL", "FAIL", "COMPLETE"]


@pytest.mark.parametrize("lost", sampled([{0}, {3, 6}, {2, 5, 13}], [{2, 5, 13}]))
@pytest.mark.parametrize("cause", ["worker", "process", "drawn", "interrupted"])
def test_a_random_study_that_lost_trials_searches_the_same_points(tmp_path: Path, lost: set[int], cause: str) -> None:
    settings = {**ONE, "sampler": {"kind": "random"}}
    points: dict[str, list[dict[str, Any]]] = {}
    for name, losing in (("whole", set[int]()), ("cut", lost)):
        one, asks = client(tmp_path / name, settings), 0
        while True:
            if asks in losing and cause == "drawn":  # killed before it had drawn a value
                one.study.ask().set_user_attr(OWNER, f"{socket.gethostname()}:1:0.00")
                assert len(one.take_over_lost()) == 1
            elif (asked := one.ask()) is None:
                break
            elif asks not in losing:
                run(one, asked)
            elif cause == "worker":
                one.worker_died(asked.number, "gone")
            elif cause == "interrupted":
                one.release()
            else:
                one = client(tmp_path / name, settings)
                assert one.take_over_lost() == [asked.number]
            asks += 1
        points[name] = [trial.params for trial in one.trials() if trial.state == TrialState.COMPLETE]
    order = sorted(points["whole"], key=repr)
    assert (len(order), sorted(points["cut"], key=repr)) == (14, order)


def test_a_trial_too_many_takes_no_draw_and_has_no_record(tmp_path: Path) -> None:
    """As two processes leave one, in a study that is given more trials later."""
    settings = {**ONE, "sampler": {"kind": "random"}}
    whole = client(tmp_path / "whole", {**settings, "trials": 4})
    expected = [asked.params for asked in iter(whole.ask, None)]
    first = client(tmp_path / "late", {**settings, "trials": 2})
    found = [asked.params for asked in iter(first.ask, None)]
    surplus = first.study.ask()
    surplus.set_user_attr(DISCARDED, SURPLUS)
    first.study.tell(surplus, state=TrialState.FAIL)
    assert [record.number for record in trial_records(first.trials(), space())] == [0, 1]
    more = client(tmp_path / "late", {**settings, "trials": 4})
    assert found + [asked.params for asked in iter(more.ask, None)] == expected


@pytest.mark.parametrize("line", [1, 2, 7])
@pytest.mark.parametrize(
    "damaged",
    ['{"op_code":99,"worker_id":"x"}', '{"op_code":"4"}', "[]", "{}", "nonsense", '{"op_code":8,"trial_id":77}'],
)
def test_a_damaged_line_is_named_and_the_lines_before_it_are_a_study(tmp_path: Path, line: int, damaged: str) -> None:
    journal = tmp_path / "s"
    one = client(journal, ONE)
    for _ in range(2):
        asked = one.ask()
        assert asked is not None
        run(one, asked)
    lines = journal.read_text().splitlines(keepends=True)
    lines[line - 1] = damaged + "\n"
    journal.write_text("".join(lines))
    with pytest.raises(UserError) as caught:
        open_storage(str(journal), 1)
    kept = f"keep the {line - 1} before it, after which the study goes on" if line > 1 else "remove the file"
    said = (
        re.escape(f"{journal}: line {line} is not one of a study (") + ".*" + re.escape(f"); {kept}, or give another")
    )
    assert re.fullmatch(said + " study.storage", str(caught.value)), caught.value
    journal.write_text("".join(lines[: line - 1]))
    assert client(journal, ONE).ask() is not None


@pytest.mark.slow
def test_a_call_whose_line_a_full_disk_cut_is_repeated_on_a_line_of_its_own(tmp_path: Path) -> None:
    journal, limit = tmp_path / "s", resource.getrlimit(resource.RLIMIT_FSIZE)
    one = client(journal, ONE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    later = threading.Timer(2, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.stat().st_size + 20, limit[1]))
    later.start()
    try:
        one.study.set_user_attr("name", "a value of some length")
    finally:
        later.join()
        signal.signal(signal.SIGXFSZ, handler)
    assert client(journal, ONE).study.user_attrs["name"] == "a value of some length"


@pytest.mark.parametrize("had", [0, 1, 3])
def test_a_trial_lost_while_it_was_drawn_is_drawn_to_its_end_and_retried(tmp_path: Path, had: int) -> None:
    one = client(tmp_path / "s", {**ONE, "trials": 1})
    trial = one.study.ask()
    trial.set_user_attr(OWNER, f"{socket.gethostname()}:1:0.00")  # no process of this number began then
    before = {path: space().dimensions[path].draw(trial, path) for path in list(space().dimensions)[:had]}
    assert one.take_over_lost() == [0]
    retry = one.ask()
    assert retry is not None
    assert one.trials()[0].params == retry.params == {**retry.params, **before}
    assert retry.retry_of == 0
    assert set(retry.params) >= {"rate", "rank", "kind"}


def test_a_trial_that_another_process_took_over_is_not_told_twice(tmp_path: Path) -> None:
    one, other = (client(tmp_path / "s", {**ONE, "trials": 1}) for _ in range(2))
    asked = one.ask()
    assert asked is not None
    assert other.take_over_lost() == [0]  # to the other client of this process, which did not ask for it, it is lost
    assert one.report(0, row(1, 0.5))
    assert one.tell(0, row(1, 0.5)) == "lost"
    retry = other.ask()
    assert retry is not None
    assert run(other, retry) == "complete"
    assert one.ask() is None


@pytest.mark.parametrize(
    "pruner",
    [
        {"kind": "median", "startup_trials": 2},
        {"kind": "successive_halving", "factor": 2},
        {"kind": "hyperband", "max_steps": 4, "factor": 2},
        {"kind": "threshold", "at_least": 0.1},
        {"kind": "median", "startup_trials": 2, "axis": "simulated_seconds", "every": 10},
    ],
)
@pytest.mark.parametrize("settings", [ONE, TWO], ids=["one", "two"])
def test_pruners_spare_the_best_of_one_objective_and_of_two(
    tmp_path: Path, pruner: dict[str, Any], settings: dict[str, Any]
) -> None:
    on = {"on": "validation.accuracy"} if settings is TWO else {}
    one = client(tmp_path / "s", {**settings, "sampler": "random", "pruner": {**pruner, **on}, "trials": 20})
    states = {}
    while (asked := one.ask()) is not None:
        states[asked.number] = (run(one, asked), asked.params["rank"])
    ranks = {state: [rank for each, rank in states.values() if each == state] for state in ("complete", "pruned")}
    assert ranks["pruned"]
    assert max(ranks["complete"]) == max(rank for _, rank in states.values())
    assert min(ranks["pruned"]) == min(rank for _, rank in states.values())


def test_a_curve_over_bits_keeps_the_earlier_value() -> None:
    curve = LearningCurve("uplink_bits", 100)
    assert curve.extend(row(1, 0.1, 150), 0.1) == [(1, 0.1)]  # nothing was known at 100 bits but this
    assert curve.extend(row(2, 0.3, 150), 0.3) == [(2, 0.1), (3, 0.3)]
    assert curve.extend(row(3, 0.5, 105), 0.5) == []
    assert curve.extend(row(6, 0.7, 100), 0.7) == [(4, 0.5), (5, 0.5), (6, 0.7)]


@pytest.mark.parametrize("rest", ['{"op_code": 5, "worker', "[" * 100_000 + "\n"], ids=["cut", "nested"])
def test_the_partial_line_of_a_killed_writer_is_dropped(tmp_path: Path, rest: str) -> None:
    one = client(tmp_path / "s", {**ONE, "trials": 2})
    asked = one.ask()
    assert asked is not None
    run(one, asked)
    with (tmp_path / "s").open("a") as journal:
        journal.write(rest)
    again = client(tmp_path / "s", {**ONE, "trials": 2})
    asked = again.ask()
    assert asked is not None
    assert run(again, asked) == "complete"
    assert len(client(tmp_path / "s", ONE).trials()) == 2


def test_a_power_cut_loses_no_line_that_was_written_before_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced, fsync, symlink, locks = tmp_path / "s", [0], os.fsync, os.symlink, []

    def sync(descriptor: int) -> None:
        fsync(descriptor)
        if os.path.sameopenfile(descriptor, journal.fileno()):
            synced.append(os.fstat(descriptor).st_size)

    def lock(target: str, link: str) -> None:
        locks.append(Path(target))
        symlink(target, link)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "symlink", lock)
    path.touch()
    with path.open("rb") as journal:
        monkeypatch.setattr(os, "fsync", sync)
        one = client(Path("s"), {**ONE, "trials": 3})
        for _ in range(2):
            asked = one.ask()
            assert asked is not None
            run(one, asked)
            assert synced[-1] == path.stat().st_size  # what Optuna has acknowledged is on the disk
        monkeypatch.undo()
    assert locks
    assert all(each.is_absolute() for each in locks)  # a lock that dangles is never released after a crash
    content = path.read_bytes()
    certain = synced[-2]
    states = [content[:size] for size in range(certain, len(content), 9)]
    states += [content[:certain] + bytes(len(content) - certain), content[: certain + 5] + bytes(9) + content[-6:]]
    for state in states:
        path.write_bytes(state)
        trials = client(path, {**ONE, "trials": 3}).trials()
        assert trials[0].state == TrialState.COMPLETE
        assert path.read_bytes().startswith(content[:certain])


@pytest.mark.parametrize(
    ("dimensions", "phrase"),
    [
        ({"a": {"kind": "choice", "values": [1, 2], "when": {"b": 1}}, "b": [1, 2]}, None),
        (
            {
                "a": {"kind": "choice", "values": [1, 2], "when": {"b": 1}},
                "b": {"kind": "choice", "values": [1, 2], "when": {"a": 1}},
            },
            "the conditions of a, b depend on each other",
        ),
        ({"a": {"kind": "choice", "values": [1, 2], "when": {"b": 3}}, "b": [1, 2]}, "b is never 3"),
        ({"backend.kind": ["ray", "local"]}, "cannot be tuned"),
    ],
)
def test_conditions_have_to_make_sense(dimensions: dict[str, Any], phrase: str | None) -> None:
    if phrase is None:
        assert list(space(dimensions).dimensions) == ["b", "a"]
        assert space(dimensions).grid() == [{"b": 1, "a": 1}, {"b": 1, "a": 2}, {"b": 2}]
        return
    with pytest.raises(UserError, match=phrase):
        space(dimensions)


class Host:
    """A study's client on a machine of its own, whose clock of the day is off and whose seconds are told to it."""

    def __init__(self, name: str, path: Path, hours_off: float, patch: pytest.MonkeyPatch) -> None:
        self._name, self._off, self._patch, self.seconds = name, 3600 * hours_off, patch, 1000.0 * len(name)
        with self.here():
            self.client = StudyClient(
                "s", open_storage(str(path), 5), StudySettings(**ONE), space(), "digest", lambda: self.seconds
            )

    @contextmanager
    def here(self) -> Iterator[None]:
        with self._patch.context() as patch:
            patch.setattr(socket, "gethostname", lambda: self._name)
            patch.setattr(time, "time", lambda now=time.time: now() + self._off)
            yield

    def beats(self) -> None:
        with self.here():
            self.client._last_heartbeat = -1e9
            self.client.heartbeat()


@pytest.mark.parametrize("hours", [-1.0, 0.0, 1.0])
def test_a_live_trial_is_left_alone_whatever_the_clocks_and_a_dead_one_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: float
) -> None:
    one, other = Host("a", tmp_path / "s", hours, monkeypatch), Host("bb", tmp_path / "s", 0.0, monkeypatch)
    with one.here():
        assert one.client.ask() is not None
    for _ in range(30):  # two and a half minutes
        one.beats()
        with other.here():
            assert other.client.take_over_lost() == []
        other.seconds += 5
    with other.here():
        assert other.client.elsewhere() == (1, 0)
        other.seconds += 54
        assert other.client.take_over_lost() == []
        other.seconds += 2
        assert other.client.take_over_lost() == [0]
        retry = other.client.ask()
    assert retry is not None
    assert retry.retry_of == 0


def test_an_observer_that_has_just_come_is_unsure_until_it_has_seen_a_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Host("a", tmp_path / "s", 0.0, monkeypatch), Host("bb", tmp_path / "s", 0.0, monkeypatch)
    with one.here():
        assert one.client.ask() is not None
    with other.here():
        assert other.client.elsewhere() == (0, 1), "neither finished nor lost"
    one.beats()
    with other.here():
        assert other.client.elsewhere() == (1, 0)


def test_total_traffic_is_a_cost_of_trials(tmp_path: Path) -> None:
    assert trial_metrics(row(3, 0.5))["total_bits"] == 301  # of rows that earlier versions stored too
    assert trial_metrics({**row(3, 0.5), "total_bits": 302})["total_bits"] == 302
    curve = LearningCurve("total_bits", every=100.0)
    assert curve.extend({**row(1, 0.25), "total_bits": 250}, 0.25) == [(1, 0.25), (2, 0.25)]
    study = client(tmp_path / "s", {"objectives": {"validation.accuracy": "maximize", "total_bits": "minimize"}})
    asked = study.ask()
    assert asked is not None
    run(study, asked)
    (done,) = study.trials()
    assert done.values == [asked.params["rank"] / 8, 400 * asked.params["rank"] + 1]
