"""The site of a benchmark: costs against a plain reference, profiles in a browser, links, escaping and bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

import narrowcast as nc
from command_line import assert_refused, narrowcast
from narrowcast.benchmarking.solve_grid import read_grid, solve_folders

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
COMPLETION = "completion-ill-conditioned"
SMALL = {"problem.rows": 60, "problem.fraction": 0.5, "iterations": 40, "evaluate_every": 3, "tolerance": 1e-12}
KINDS = ("asd", "power_factorisation", "lmafit")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two problems solved by three solvers each, and a third one whose only solve was interrupted."""
    output = tmp_path_factory.mktemp("runs")
    replicas = {"replicas.solver.kind": list(KINDS), "replicas.problem.condition": [2, 200]}
    nc.solve(COMPLETION, {**SMALL, **replicas}, output=output, progress=False)

    def stop(row: Any) -> None:
        if row["iteration"] >= 10:
            signal.raise_signal(signal.SIGINT)

    words = {**SMALL, "problem.condition": 2, "solver.kind": "asd", "solver.continuation": {}, "seed": 1, "name": "cut"}
    with pytest.raises(KeyboardInterrupt):
        nc.solve(COMPLETION, words, output=output, progress=stop)
    return output


@pytest.fixture(scope="module")
def site(runs: Path) -> Path:
    """The first page of their site."""
    return nc.site(folder=runs / "site", output=runs, tolerances=[1e-2, 1e-6])


def data_of(page: Path) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert found is not None
    return json.loads(found[1])


@pytest.mark.slow
def test_costs_are_those_of_the_first_measurement_at_the_goal(runs: Path, site: Path) -> None:
    data = data_of(site)
    assert len(data["problems"]) == 3
    assert data["goals"] == ["error ≤ 0.01", "error ≤ 1e-6", "within 1 % of the least error of any run"]
    assert {*data["solvers"]} == {*KINDS, "asd continuation"}
    least: dict[int, float] = {}
    tables = {}
    for run in data["runs"]:
        name = Path(run["page"]).stem
        if name == "cut":
            assert run["ended"] == "no result"
            assert re.match(r"no result after iteration 9, .*least error", run["why"])
            continue
        table = nc.load_run(name, output=runs).iterations.dropna(subset="test.relative_error")
        tables[name] = table
        least[run["problem"]] = min(least.get(run["problem"], np.inf), table["test.relative_error"].min())
    assert len(tables) == 6
    for run in data["runs"]:
        if run["ended"] == "no result":
            continue
        for goal, cost in zip((1e-2, 1e-6, max(1.01 * least[run["problem"]], 1e-6)), run["costs"], strict=True):
            expected = None
            for _, row in tables[Path(run["page"]).stem].iterrows():
                if row["test.relative_error"] <= goal:
                    expected = [pytest.approx(row["solver_seconds"], rel=1e-3), row["iteration"]]
                    break
            assert cost == expected
    assert any(run["costs"][1] is None for run in data["runs"])
    assert any(run["costs"][1] is not None for run in data["runs"])


class Links(HTMLParser):
    """Collects what a page refers to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("href", "src")]


def test_every_link_leads_to_a_page_of_the_site(site: Path) -> None:
    pages = sorted(site.parent.rglob("*.html"))
    assert len(pages) == 1 + 3 + 7
    for page in pages:
        data = re.findall(r'"page":"([^"]*)"', page.read_text())
        links = Links(page).found
        assert data or links
        for target in (*data, *links):
            assert (page.parent / unquote(target)).is_file(), target
        assert page.stat().st_size < 60_000


def test_names_and_settings_are_escaped(runs: Path, tmp_path: Path) -> None:
    evil = "\"><img src=x>&'</script>"
    folder = tmp_path / evil.replace("/", "_")
    shutil.copytree(next(each for each in solve_folders(runs) if each.name != "cut"), folder)
    config = folder / "config.yaml"
    config.write_text(re.sub(r"symmetric: .*", f"symmetric: '{evil.replace(chr(39), '')}'", config.read_text()))
    other = next(each for each in solve_folders(runs) if "condition-200" in each.name)
    page = nc.site([folder, other], tmp_path / "site")
    for each in page.parent.rglob("*.html"):
        assert "<img" not in each.read_text()
        assert each.read_text().count("</script>") <= 2
    (label,) = {each["label"] for each in data_of(page)["problems"] if "img" in each["label"]}
    assert '"><img src=x>&</script>' in label
    (shown,) = [each for each in page.parent.rglob("problems/*.html") if "&lt;img" in each.read_text()]
    assert label in unescape(shown.read_text())


def test_labels_have_the_settings_that_differ(runs: Path) -> None:
    benchmark = read_grid(solve_folders(runs))
    assert [each.label for each in benchmark.problems] == [
        f"synthetic_completion condition={condition} seed={seed}" for condition, seed in ((2, 1), (2, 0), (200, 0))
    ]
    without_result, first, _ = benchmark.problems
    assert "observed" not in without_result.attributes
    assert first.metric == "test.relative_error"
    assert first.attributes["entries per degree of freedom"] == round(1800 / (2 * (60 + 60 - 2)), 2)


def test_runs_of_a_benchmark_have_the_names_of_its_file(runs: Path, tmp_path: Path) -> None:
    folders = [each for each in solve_folders(runs) if each.name != "cut"][:2]
    for folder, name in zip(folders, ("small.k2.plain.seed-0", "small.k2.other.seed-0"), strict=True):
        shutil.copytree(folder, tmp_path / name)
    benchmark = read_grid(solve_folders(tmp_path))
    assert [each.label for each in benchmark.problems] == ["small.k2"]
    assert benchmark.solvers == ("other", "plain")
    (tmp_path / name / "result.json").unlink()
    line = {"instance": name, "state": "failed", "reason": "the solver diverged", "digest": ""}
    (tmp_path / "instances.jsonl").write_text(json.dumps(line) + "\n")
    (problem,) = read_grid(solve_folders(tmp_path)).problems
    assert problem.runs["other"].ended == "failed"
    assert problem.runs["other"].why(problem.metric).startswith("failed: the solver diverged, least error ")


def test_what_cannot_be_compared_is_refused(runs: Path, tmp_path: Path) -> None:
    names = [each.name for each in solve_folders(runs) if each.name != "cut"]
    shutil.copytree(runs / names[0], tmp_path / "again")
    (tmp_path / "file").write_text("")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "config.yaml").write_text("data: digits\n")
    cases: list[tuple[list[object], str]] = [
        (["nope"], "nope: no such folder; give the folder of a solve"),
        ([tmp_path / "experiment"], "not the folder of a solve, which a site compares; omit it"),
        ([*names, tmp_path / "again"], "are asd on synthetic_completion condition=2 with one seed; give one of"),
        (["--metric", "test.psnr"], "has the error test.psnr; its errors: test.relative_error, "),
        (["--tolerance", "0"], "goals are (0.0, 0.01); give tolerances above 0, at least one"),
        (["--folder", tmp_path / "file" / "site"], "give another file"),
    ]
    for words, phrase in cases:
        assert_refused(narrowcast("site", "--output", runs, "--folder", tmp_path / "site", *words), phrase)
    of_folder = nc.site([runs], tmp_path / "site")
    assert len(data_of(of_folder)["runs"]) == 7
    assert_refused(narrowcast("site", "--output", tmp_path / "none"), "no solves to compare; give the folder of")


@pytest.mark.program(*CHROMIUM)
def test_profiles_in_a_browser_are_those_of_a_plain_reference(site: Path, tmp_path: Path) -> None:
    data = data_of(site)
    page = tmp_path / "page.html"  # of the solvers and problems with results
    data["runs"] = [each for each in data["runs"] if each["ended"] != "no result"]
    solvers = sorted({run["solver"] for run in data["runs"]})
    assert len(solvers) == len(KINDS)
    data["solvers"] = [data["solvers"][place] for place in solvers]
    data["runs"] = [
        {**run, "solver": solvers.index(run["solver"]), "problem": run["problem"] - 1} for run in data["runs"]
    ]
    data["problems"] = data["problems"][1:]
    text = json.dumps(data)
    page.write_text(re.sub(r'(id="data">).*?(</script>)', lambda m: m[1] + text + m[2], site.read_text(), count=1))
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    said = subprocess.run(
        [
            str(next(filter(None, map(shutil.which, CHROMIUM)))),
            *words,
            "--virtual-time-budget=3000",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HOME": str(tmp_path)},
    ).stdout
    rows = re.findall(r'<tr data-solver="([^"]*)">(.*?)</tr>', said)
    shown = {name: [int(each) for each in re.findall(r'<td class="number">(\d+)</td>', row)] for name, row in rows}
    costs = np.full((len(data["problems"]), len(data["solvers"])), np.inf)
    for run in data["runs"]:
        if run["costs"][0] is not None:
            costs[run["problem"], run["solver"]] = run["costs"][0][0]
    for place, name in enumerate(data["solvers"]):
        expected = []
        for bound in (1.0, 2.0, 10.0, np.inf):
            times = 0
            for row in costs:
                times += bool(np.isfinite(row[place]) and row[place] <= bound * row.min())
            expected.append(times)
        assert shown[name] == expected
    assert f"over {len(costs)} of {len(costs)} problems" in said
