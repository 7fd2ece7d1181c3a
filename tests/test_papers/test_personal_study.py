"""Personal models: the search of each method's numbers, the clients' images, pooled accuracy, and the kept results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import narrowcast
from narrowcast.platform.data.samples import one_array
from narrowcast.platform.data.watch import WatchExercises
from narrowcast.studies.execution import Planned, Queue, light_run
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec
from narrowcast_papers.personal.clients import MixedClients
from narrowcast_papers.personal.means import accuracies_of_means, users_of
from narrowcast_papers.personal.methods import (
    FASHION,
    MODELS,
    MOVIELENS,
    OWN_RATE,
    SPLITS,
    SUBJECTS,
    TEST_SEEDS,
    TUNED,
    TUNING_SEEDS,
    USERS,
    WATCH,
    Cell,
    cells,
    plan_of,
)
from narrowcast_papers.personal.mnist import TwoDigitClients, pooled
from narrowcast_papers.personal.table import compared, finished_methods, judge_group
from papers import PAPERS, queue_of
from planned_runs import ended

SAME = ("model_sha256", "uplink_bits", "downlink_bits", "simulated_seconds")


def _peaked(planned: Planned) -> dict[str, Any]:
    """Return a result that is best at a rate of 0.2, and half a point higher for Ditto."""
    rate = planned.spec.configured(planned.seed, "x").training.learning_rate  # type: ignore[attr-defined]
    accuracy = 0.8 - 0.01 * abs(np.log2(rate / 0.2)) + 0.005 * ("-ditto-" in planned.spec.label)
    final = {"validation.accuracy.mean": accuracy, "test.accuracy.mean": accuracy + 0.001 * planned.seed}
    final["test.accuracy.worst_10_percent"] = 0.5
    point = {"uplink_bits": 80_000_000, "downlink_bits": 80_000_000, "final": final}
    return {**point, "rounds": 100, "curve": [point]}


@pytest.mark.slow
def test_every_number_is_searched_on_seeds_that_are_no_test_seeds() -> None:
    model, names = "perceptron", list(MODELS["perceptron"][1])
    queue = Queue([plan_of(SPLITS[0], model)], Rows())
    jobs = [planned for job in ended(queue, _peaked) for planned in job]
    tuning, test = ([each for each in jobs if each.test == wanted] for wanted in (False, True))
    assert {each.seed for each in tuning} == set(range(100, 100 + TUNING_SEEDS))
    assert {each.seed for each in test} == set(range(TEST_SEEDS))
    found = finished_methods(queue.rows, cells(SPLITS[0], model))
    assert list(found) == names
    assert len(tuning) == TUNING_SEEDS * sum(each.tries for each in found.values())
    assert all(each.best[0] == 0.2 for each in found.values()), "one step of the ladder above the start"
    said = {verdict.what: verdict for verdict in judge_group(queue.rows, SPLITS[0], model)}
    ditto = said[f"{SPLITS[0].name}, {model}: Ditto"]
    assert ditto.difference == "+0.50"
    assert "10 MB up, 20 MB" in ditto.verdict
    assert said[f"{SPLITS[0].name}, {model}, 100 MB: Ditto"].by_seed == pytest.approx([80.5, 80.6, 80.7, 80.8, 80.9])


def test_a_share_or_a_number_of_epochs_ends_where_its_ladder_does() -> None:
    apfl, tuned = (MODELS["softmax"][1][name] for name in ("APFL", TUNED))
    assert set(apfl.neighbours((0.1, 1.0))) == {(0.05, 1.0), (0.2, 1.0), (0.1, 0.9)}
    assert set(tuned.neighbours((0.1, 1))) == {(0.05, 1), (0.2, 1), (0.1, 2)}
    pfedme = MODELS["softmax"][1]["pFedMe"]
    assert (0.4, 0.4, 3.0) in pfedme.neighbours((0.4, 0.4, 1.0))
    assert (0.4, 0.8, 3.0) not in pfedme.neighbours((0.4, 0.4, 3.0)), "steps of 2 or more are refused"


def test_gradients_of_a_run_are_counted_image_by_image() -> None:
    few = SPLITS[0]
    counted = {
        name: Cell(few, "softmax", name).gradients(MODELS["softmax"][1][name].start) for name in MODELS["softmax"][1]
    }
    plain = 100 * 10 * 20 * 2
    assert counted["FedAvg"] == counted["training alone"] == plain
    assert counted[TUNED] == counted[OWN_RATE] == plain + 40 * 20 * 8, "eight epochs of each client at the end"
    assert counted["Ditto"] == counted["APFL"] == 2 * plain
    assert counted["pFedMe"] == 5 * plain
    assert counted["Per-FedAvg"] == plain + 40 * 10, "an image is in one half of a batch"
    assert Cell(few, "perceptron", "FedRep").gradients((0.1, 4.0)) == plain * 5 / 2


def test_differences_are_from_the_control_that_is_named() -> None:
    reached = {TUNED: (70.0, 71.0, 72.0), OWN_RATE: (71.0, 72.5, 73.0), "Ditto": (73.0, 73.5, 75.0)}
    for control, wanted in ((TUNED, ["", "+1.17", "+2.83"]), (OWN_RATE, ["-1.17", "", "+1.67"])):
        verdicts = compared("here", reached, {}, control)
        assert [verdict.difference for verdict in verdicts] == wanted
        assert [verdict.what for verdict in verdicts if verdict.verdict == "reference"] == [f"here: {control}"]


@pytest.mark.data("watch-exercises")
def test_subjects_take_so_many_steps_of_so_many_windows() -> None:
    examples = WatchExercises(seed=0, validation_share=0.2).load().examples
    assert len(examples) == SUBJECTS.clients == SUBJECTS.cohort
    assert examples.mean() == pytest.approx(SUBJECTS.samples)
    steps = np.ceil(examples / SUBJECTS.batch_size)
    assert (steps.min(), steps.max()) == (10, 18)


@pytest.mark.data("ml-100k")
def test_users_have_so_many_ratings_of_films_that_many_have_seen() -> None:
    drawn = [users_of(seed) for seed in range(3)]
    assert {(data.n_clients, data.n_items, data.n_classes) for data in drawn} == {(USERS.clients, 300, 2)}
    assert np.mean([data.examples.mean() for data in drawn]) == pytest.approx(USERS.samples, abs=0.1)
    assert min(data.examples_of("test").min() for data in drawn) > 0


@pytest.mark.data("ml-100k")
def test_means_of_users_and_films_predict_more_than_the_networks() -> None:
    by_seed = [accuracies_of_means(seed) for seed in range(TEST_SEEDS)]
    means = {name: np.mean([values[name] for values in by_seed]) for name in by_seed[0]}
    assert means == pytest.approx({"the user's mean": 66.0, "the film's mean": 66.2, "both": 69.6}, abs=0.05)
    found = finished_methods(queue_of(MOVIELENS).rows, cells(USERS, "item embedding"))
    assert max(np.mean(method.reached) for method in found.values()) == pytest.approx(67.1, abs=0.05)


def test_rounds_of_fine_tuned_scolr_are_those_of_scolr() -> None:
    overrides = ("rounds=2", "evaluate_every=2", "clients_per_round=5", "evaluate_clients=[test]")
    ends = {}
    for kind in ("scolr", "narrowcast_papers.personal.low_rank:FineTunedSCoLR"):
        spec = RunSpec("low-rank", "fedavg-digits", (*overrides, f"algorithm={{kind: {kind}, rank: 2}}"))
        ends[kind] = light_run(spec, 0)
    plain, tuned = ends.values()
    assert [plain[name] for name in SAME] == [tuned[name] for name in SAME]
    assert plain["final"]["test.accuracy.mean"] != tuned["final"]["test.accuracy.mean"]


@pytest.mark.data("fashion-mnist")
def test_clients_have_images_of_their_own_in_their_proportions() -> None:
    data = MixedClients(seed=3, images=100).load()
    assert set(data.examples.tolist()) == {100}
    for part, size in (("validation", 50), ("test", 100)):
        assert set(data.examples_of(part).tolist()) == {size}
    images = {row.tobytes() for part in (data.train, data.validation) for row in one_array(part.features)}
    assert len(images) >= 40 * 150 - 5, "no image twice, but for the set's few pairs"
    shares = {}
    for part in ("train", "test"):
        index, labels = data.of_clients(part), getattr(data, part).labels
        own = np.split(labels[index.order], index.indptr[1:-1])
        shares[part] = np.array([np.bincount(each, minlength=10) / len(each) for each in own])
    assert np.abs(shares["train"] - shares["test"]).sum(axis=1).mean() < 0.25, "two draws of 100 from one mixture"
    assert np.abs(shares["train"] - shares["test"][::-1]).sum(axis=1).mean() > 1


@pytest.mark.data("mnist")
def test_sizes_of_two_digit_clients_are_those_of_the_script() -> None:
    data = TwoDigitClients(seed=0).load()
    sizes = [1824, 2451, 1566, 1362, 1470, 975, 582, 213, 231, 78, 24, 79, 63, 23, 33, 30, 17, 21, 4, 30]
    assert data.examples.tolist() == sizes
    assert len(data.test) == 3704
    for client, own in enumerate(np.split(data.train.labels[data.order], data.indptr[1:-1])):
        assert set(own.tolist()) <= {client % 10, (client + 1) % 10}


@pytest.mark.data("mnist")
def test_pooled_accuracy_of_clients_that_use_the_global_model_is_its_accuracy() -> None:
    overrides = (
        *("rounds=1", "evaluate_every=1", "clients_per_round=5", "evaluate_clients=[test]", "model=softmax"),
        *("algorithm=fedavg", "data={kind: narrowcast_papers.personal.mnist:TwoDigitClients}"),
    )
    spec = RunSpec("pooled", "fedavg-digits", overrides)
    plain = light_run(spec, 0)["final"]
    assert pooled(spec, 0, test=True)["final"]["test.accuracy"] == pytest.approx(plain["test.accuracy"], abs=1e-9)
    assert plain["test.accuracy"] != pytest.approx(plain["test.accuracy.mean"], abs=1e-3)


@pytest.mark.parametrize("name", [FASHION, WATCH, MOVIELENS, "pfedme-mnist", "ditto-attacked"])
def test_the_published_table_has_every_run(name: str, tmp_path: Path) -> None:
    assert not list(queue_of(name).missing())
    words = ("reproduce", name, "--papers", PAPERS, "--time-limit", 0, "--output", tmp_path)
    assert narrowcast(*words).status == 0
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_under_attack_methods_are_compared_with_what_no_attacker_reaches(tmp_path: Path) -> None:
    words = ("reproduce", "ditto-attacked", "--papers", PAPERS, "--time-limit", 0, "--output", tmp_path)
    assert narrowcast(*words).status == 0
    rows = [line.split(" | ") for line in (tmp_path / "ditto-attacked.md").read_text().splitlines() if " | " in line]
    verdicts = {row[0].removeprefix("| "): row[-1] for row in rows}
    assert verdicts["Ditto, opposite change x 5"].startswith("below training alone")
    assert verdicts["Ditto, median, opposite change x 5"].startswith("above training alone")
    assert "below FedAvg, fine-tuned at its own rate" in verdicts["Ditto, random labels"]
    assert len([name for name in verdicts if name.startswith("training alone")]) == 1
