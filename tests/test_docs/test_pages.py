"""Every page of the site and the README, done as written: its files, its Python and its commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from left_out import is_here
from narrowcast.platform.data.download import VARIABLE
from page_session import run_page
from page_summary import PAGE_SESSION
from pages import DOCS, blocks, pages

# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
Names = dict[str, Any]


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS.parent).with_suffix("")).removeprefix("docs/")


def first_experiment(names: Names) -> None:
    dense, coded = names["dense"], names["coded"]
    assert coded.uplink_bits * 20 < dense.uplink_bits
    assert coded.simulated_seconds * 5 < dense.simulated_seconds
    assert min(names["accuracies"]) > 80
    assert Path("digits.png").stat().st_size > 10_000


def own_model_and_data(names: Names) -> None:
    assert 0.8 < names["result"].final["test.coverage"] < 1
    assert names["result"].best["test.loss"].value == names["result"].rounds["test.loss"].min()
    assert names["path"].stat().st_size > 0


def own_algorithm_and_codec(names: Names) -> None:
    fedavg, momentum, signs = names["results"]
    assert momentum.final["test.accuracy"] > fedavg.final["test.accuracy"]
    assert 25 < fedavg.uplink_bits / signs.uplink_bits < 33


def channel_and_budgets(names: Names) -> None:
    assert names["ranks"].simulated_seconds * 5 < names["same_for_all"].simulated_seconds
    assert set(names["ranks"].clients["rank"]) >= {0, 1, 16}
    fair, equal = (each.clients[each.clients.delivered].uplink_bits for each in names["results"])
    assert fair.quantile(0.1) > equal.quantile(0.1)


def study_for_a_paper(names: Names) -> None:
    runs = {each.name: each for each in names["results"]}
    assert len(runs) == 12
    assert all(each.final["test.rmse"] < 2 for each in runs.values())  # it starts at 3
    assert all(
        3 * runs[f"{name}-shared-seed-{seed}"].uplink_bits < runs[f"{name}-orthogonal-seed-{seed}"].uplink_bits
        for name in names["methods"]
        for seed in range(3)
    )
    assert len({each.model_sha256 for each in runs.values()}) == 12
    assert all(Path(file).stat().st_size > 0 for file in ("figure.pdf", "table.tex", "runs.csv"))


SHOWN: dict[str, Callable[[Names], None]] = {
    "tutorials/first-experiment": first_experiment,
    "tutorials/own-model-and-data": own_model_and_data,
    "tutorials/own-algorithm-and-codec": own_algorithm_and_codec,
    "tutorials/channel-and-budgets": channel_and_budgets,
    "howto/study-for-a-paper": study_for_a_paper,
}
"""What the text of a page says about its results."""
QUICK = {
    "bits-and-time",
    "channels",
    "explanation/reproducibility",
    "howto/diagnose-training",
    "howto/faster-runs",
    "index",
    "install",
    "running-on-a-cluster",
}
"""Pages that take less than ten seconds."""
LONG = {
    *("experiments", "howto/benchmark-solvers", "howto/compare-methods", "howto/compress-uploads"),
    *("howto/papers-of-your-own", "howto/secure-sums", "howto/study-for-a-paper", "plugins", "reproduce", "sdp"),
    "solve",
}
"""Pages that take a minute or more, for `make thorough`."""


def sessions() -> list[Any]:
    """A case for each page with something to do: with its data sets where they are here, else without."""
    cases = []
    for page in pages():
        name, found = name_of(page), [*blocks(page)]
        done = [block for block in found if block.kind in ("python", "console") and not block.not_run]
        slow = [] if name in QUICK else [pytest.mark.slow, *([pytest.mark.thorough] if name in LONG else [])]
        sets = sorted({each for block in done for each in block.data})
        if any(not block.data for block in done) and not (sets and all(map(is_here, sets))):
            cases.append(pytest.param(page, False, id=name, marks=slow))
        if sets:
            marks = [pytest.mark.data(*sets), pytest.mark.slow, *([pytest.mark.thorough] if name in LONG else [])]
            cases.append(pytest.param(page, True, id=f"{name}, with data", marks=marks))
    return cases


@pytest.mark.timeout(1200)  # dozens of commands, on a machine that may do other things
@pytest.mark.parametrize(("page", "with_data"), sessions())
def test_a_page_is_done_as_written(
    page: Path,
    with_data: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    if not with_data:
        monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    session = run_page(page, tmp_path, with_data)
    record_property(PAGE_SESSION, (name_of(page), session.commands, session.python_blocks))
    if name_of(page) in SHOWN:
        monkeypatch.chdir(tmp_path)
        SHOWN[name_of(page)](session.names)
