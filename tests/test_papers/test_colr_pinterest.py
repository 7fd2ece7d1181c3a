"""Figure 6: convergence on Pinterest, on a small set in the format of NCF's files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from narrowcast.platform.data import download
from narrowcast.platform.data.movielens import Pinterest
from narrowcast.platform.data.sets import PINTEREST
from narrowcast.platform.errors import UserError
from narrowcast.studies.recorded import ReproductionRun
from narrowcast.studies.reproduction import run_recorded
from narrowcast.studies.tables import Effort
from narrowcast_papers.colr.pinterest import RUNS, judge_convergence, plot_convergence
from papers import recorded, targets

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # MLflow's store
USERS, ITEMS = 560, 130


@pytest.fixture
def pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `pinterest` of 560 users with six pins each, one of them for the test, found as the data set."""
    folder, random = tmp_path / "pinterest", np.random.default_rng(0)
    folder.mkdir()
    train, test, negative = [], [], []
    for user in range(USERS):
        pinned, others = np.split(random.permutation(ITEMS)[:105], [6])
        train += [f"{user}\t{item}\t1\t0" for item in pinned[1:]]
        test.append(f"{user}\t{pinned[0]}\t1\t0")
        negative.append("\t".join([f"({user},{pinned[0]})", *map(str, others)]))
    for suffix, lines in ((".train.rating", train), (".test.rating", test), (".test.negative", negative)):
        (folder / f"{PINTEREST}{suffix}").write_text("\n".join([*lines, ""]))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(download.VARIABLE, str(tmp_path))
    return folder


@pytest.mark.usefixtures("pins")
def test_the_pins_are_read_from_ncfs_files() -> None:
    data = Pinterest(validation="none").load()
    assert (data.name, data.n_users, data.n_items, len(data.items)) == ("pinterest", USERS, ITEMS, 5 * USERS)
    assert data.negatives.shape == (USERS, 99)
    held_out = Pinterest().load()
    assert len(held_out.items) == 4 * USERS
    with pytest.raises(UserError, match='has no times, so validation cannot be "second_last"'):
        Pinterest(validation="second_last").load()


def test_an_incomplete_folder_is_said_to_be_so(pins: Path) -> None:
    (pins / f"{PINTEREST}.test.negative").unlink()
    with pytest.raises(UserError, match=r"pinterest lacks one of .*negative.*run: narrowcast data fetch pinterest$"):
        Pinterest().load()


def test_without_the_data_the_target_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(download.VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match=r"^pinterest was not found: no .* run: narrowcast data fetch pinterest$") as it:
        run_recorded(
            targets()["colr-fig6"], recorded("colr-fig6"), Effort(seeds=1), output=tmp_path / "out", say=lambda _: None
        )
    assert "\n" not in str(it.value)


@pytest.mark.slow
@pytest.mark.usefixtures("pins")
def test_a_run_keeps_its_accuracies_by_round(tmp_path: Path) -> None:
    run = ReproductionRun(RUNS["CoLR"], 0, 3, tmp_path / "runs")
    assert (run.experiment.clients_per_round, run.experiment.training.learning_rate) == (550, 0.25)
    result = run.run()
    history = result["history"]
    assert history["round"][-1] == 3
    assert history["test.hr@10"][-1] == result["final"]["test.hr@10"]
    assert run.finished()["history"] == history  # type: ignore[index]


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_end_of_each_curve_is_judged_and_drawn(tmp_path: Path, seeds: int) -> None:
    published = {"FedMF": (84.74, 51.79), "CoLR": (81.03, 48.5), "SVD": (27.5, 10.0), "Top-K": (75.7, 40.0)}
    results = {}
    for method, (hr, ndcg) in published.items():
        noises = (0.0, 0.01, 0.02)[:seeds]
        final = [{"test.hr@10": (hr + noise) / 100, "test.ndcg@10": (ndcg + noise) / 100} for noise in noises]
        curve = [{"round": [1000, 2000], **{name: [0.1, end] for name, end in each.items()}} for each in final]
        results[RUNS[method].label] = [{"final": one, "history": two} for one, two in zip(final, curve, strict=True)]
    judged = judge_convergence(results)
    assert [row.what for row in judged][:3] == [
        "HR@10, FedMF, after the last round",
        "NDCG@10, FedMF, after the last round",
        "HR@10, CoLR, after the last round",
    ]
    assert len(judged) == 6
    assert {row.verdict.split(" (")[0] for row in judged} == {"level" if seeds == 3 else "not settled with 1 seed"}
    plot_convergence(results, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
