from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from narrowcast.cli.shared import pairs_table
from narrowcast.platform.errors import UserError
from narrowcast.runs.comparison import Comparison
from narrowcast.runs.comparison_figure import comparison_figure
from narrowcast.runs.comparison_tables import differences_table, traffic_table
from narrowcast.runs.finished_run import TextTable
from narrowcast.runs.result import Result

N_ROUNDS = 20
TOP_5_TARGET = {"metric": "test.top_5", "value": 0.2, "simulated_seconds_to": None, "uplink_bits_to": None}
TOP_5_TARGET |= {"total_bits_to": None, "rounds_to": None}


def write_run(folder: Path, hit_rate: float = 0.6841, scale: int = 1, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    index = np.arange(1, N_ROUNDS + 1)
    curve = hit_rate * index / N_ROUNDS
    rounds = {
        "round": index,
        "total_uplink_bits": index * 8_000_000 * scale,
        "total_bits": index * (8_000_000 * scale + 400_000_000),
        "simulated_seconds": index * 249.0,
        "test.hr@10": pa.array(curve, mask=index % 5 != 0),
    }
    pq.write_table(pa.table(rounds), folder / "rounds.parquet")
    result = {
        "name": folder.name,
        "algorithm": "scolr",
        "data": "ml-1m",
        "backend": "local",
        "seed": 17,
        "rounds": N_ROUNDS,
        "final": {
            "test.hr@10": hit_rate,
            "test.ndcg@10": 0.4012,
            "validation.hr@10": 0.701,
            "validation.ndcg@10": 0.4133,
        },
        "best": {"test.hr@10": {"value": 0.6902, "round": 15}},
        "uplink_bits": 160_000_000 * scale,
        "downlink_bits": 8_000_000_000,
        "full_uplink_bits": 2_592_000_000,
        "touched_uplink_bits": 2_592_000_000,
        "simulated_seconds": 4980.0,
        "wall_seconds": 83.0,
        "model_sha256": "0123456789abcdef" * 4,
        "mlflow_run_id": None,
        "git_commit": None,
    }
    result |= changes
    result["total_bits"] = result["uplink_bits"] + result["downlink_bits"]
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return folder


def comparison_table(comparison: Comparison) -> Table:
    return terminal_table(comparison.results_table())


def terminal_table(text: TextTable, width: int = 1000) -> Table:
    (table,) = text.fitting(width)
    return table


def compare(folders: list[Path]) -> Comparison:
    return Comparison(tuple(Result.load(folder) for folder in folders))


def cells(table: Table, row: int) -> list[str]:
    columns = [list(column.cells) for column in table.columns]
    return [str(column[row]) for column in columns]


def printed(table: Table) -> str:
    console = Console(width=140, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    run = Result.load(write_run(tmp_path / "lr=0.1" / "adaptive"))
    assert run.folder == tmp_path / "lr=0.1" / "adaptive"
    assert run.name == "adaptive"
    assert run.uplink_bits == 160_000_000
    assert run.best["test.hr@10"].round == 15
    assert run.history.num_rows == N_ROUNDS
    assert "lr" not in run.history.column_names


def test_the_table_has_the_numbers_of_the_files(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "adaptive"), write_run(tmp_path / "full", 0.6931, 20, algorithm="fedmf")]
    table = comparison_table(compare(folders))
    assert cells(table, 0)[:6] == ["adaptive", "scolr", "ml-1m", "20", "68.41 %", "40.12 %"]
    assert cells(table, 0)[6:] == ["20.0 MB", "16.2x", "1.00 GB", "1.02 GB", "1 h 23 min", "1 min 23 s"]
    assert cells(table, 1)[:8] == ["full", "fedmf", "ml-1m", "20", "69.31 %", "40.12 %", "400 MB", "0.81x"]
    assert table.caption is None
    assert "68.41 %" in printed(table)


def bold_rows(table: Table) -> list[int]:
    hit_rates = list(table.columns[4].cells)
    return [row for row, cell in enumerate(hit_rates) if isinstance(cell, Text) and cell.style == "bold"]


def test_the_best_hit_rate_is_bold(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(index), value) for index, value in enumerate((0.5, 0.7, 0.6))]
    assert bold_rows(comparison_table(compare(folders))) == [1]


def test_runs_on_different_data_are_told_apart(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "a", 0.5),
        write_run(tmp_path / "b", 0.7, data="ml-100k"),
        write_run(tmp_path / "c", 0.6),
    ]
    table = comparison_table(compare(folders))
    assert "Different data sets (ml-1m, ml-100k)" in str(table.caption)
    assert bold_rows(table) == [1, 2]


def test_an_unmeasured_metric_is_a_dash_and_never_the_best(tmp_path: Path) -> None:
    table = comparison_table(compare([write_run(tmp_path / "a", final={})]))
    assert cells(table, 0)[4] == "-"
    assert bold_rows(table) == []


def test_runs_of_one_name_are_told_apart_by_folder(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "first" / "run[1]"), write_run(tmp_path / "second" / "run[1]")]
    assert compare(folders).labels() == [f"run[1] ({folder})" for folder in folders]


def test_a_metric_is_in_percent_if_its_run_declares_a_share(tmp_path: Path) -> None:
    own = {"final": {"test.hr@10": 0.5, "test.top_5": 0.25}, "targets": [TOP_5_TARGET]}
    declared = Result.load(write_run(tmp_path / "declared", **own, shares=["top_5"]))
    assert ("test top 5", "25.00 %") in declared.summary()
    assert ("test HR@10", "0.5") in declared.summary()
    assert "test top 5 ≥ 20 %" in dict(declared.summary())
    earlier = Result.load(write_run(tmp_path / "earlier", **own))
    assert ("test top 5", "0.25") in earlier.summary()
    assert ("test HR@10", "50.00 %") in earlier.summary()
    for name, label in (("declared", "test HR@10"), ("earlier", "test HR@10 (%)")):
        (axes,) = comparison_figure(compare([tmp_path / name]).groups, ["round"], None).axes
        assert axes.get_ylabel() == label


def test_a_run_that_is_given_twice_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a, b = (write_run(tmp_path / name) for name in "ab")
    compare([a, b])
    assert caplog.messages == []
    compare([a, b, tmp_path / "b" / ".." / "a"])
    assert caplog.messages == ["a is given 2 times: these rows are one run"]


def test_a_name_with_brackets_is_printed_as_it_is(tmp_path: Path) -> None:
    assert "run[red]" in printed(comparison_table(compare([write_run(tmp_path / "run[red]")])))


def test_no_number_is_cut_in_a_narrow_terminal(tmp_path: Path) -> None:
    console = Console(width=80, color_system=None)
    name = "radio.channel.access-frequency-shared"
    with console.capture() as capture:
        compare([write_run(tmp_path / name)]).print(console)
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in capture.get()
    shown = " ".join(capture.get().split())
    for cell in (name, "68.41 %", "20.0 MB", "1 h 23 min", "1 min 23 s"):
        assert cell in shown


@pytest.mark.parametrize("n_runs", [1, 3, 12])
def test_the_figure_has_a_line_a_run_and_a_legend_that_covers_no_data(n_runs: int, tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"scolr-rank-{index}", 0.5 + index / 100) for index in range(n_runs)]
    figure = compare(folders).figure()
    figure.draw_without_rendering()
    rounds, uplink, total, time = figure.axes
    assert rounds.get_xlabel() == "round"
    assert np.asarray(rounds.lines[0].get_xdata()).tolist() == [5, 10, 15, 20]
    assert uplink.get_xscale() == "log"
    assert (uplink.get_xlabel(), time.get_xlabel()) == ("cumulative uplink (MB)", "simulated time (min)")
    assert uplink.get_ylabel() == time.get_ylabel() == "test HR@10 (%)"
    for axes in (rounds, uplink, total, time):
        assert [line.get_label() for line in axes.lines] == [folder.name for folder in folders]
        looks = {(str(line.get_color()), str(line.get_linestyle())) for line in axes.lines}
        assert len(looks) == n_runs
    assert np.asarray(uplink.lines[0].get_xdata()).tolist() == [5.0, 10.0, 15.0, 20.0]
    assert np.asarray(total.lines[0].get_xdata()).tolist() == [255.0, 510.0, 765.0, 1020.0]
    assert np.asarray(time.lines[0].get_xdata()).tolist() == pytest.approx([20.75, 41.5, 62.25, 83.0])
    assert np.asarray(time.lines[-1].get_ydata())[-1] == pytest.approx(50 + n_runs - 1)
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= figure.bbox.width
    assert not box.count_overlaps([axes.get_tightbbox() for axes in figure.axes])
    assert uplink.get_window_extent().height > 0.25 * figure.bbox.height  # in the upper of two rows


def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    names = ["_hidden", "a$b_{$c", "long-name-" * 8]
    figure = compare([write_run(tmp_path / name) for name in names]).figure()
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    assert legend.get_window_extent().x1 <= figure.bbox.width


def test_the_figure_is_written_as_its_suffix_says(tmp_path: Path) -> None:
    comparison = compare([write_run(tmp_path / "adaptive")])
    path = tmp_path / "new" / "comparison.png"
    comparison.plot(path)
    image = matplotlib.image.imread(path)
    assert image[..., :3].std() > 0.02
    comparison.plot(tmp_path / "comparison.svg")
    assert "<svg" in (tmp_path / "comparison.svg").read_text(encoding="utf-8")


def test_a_suffix_that_is_no_figure_is_refused(tmp_path: Path) -> None:
    comparison = compare([write_run(tmp_path / "adaptive")])
    with pytest.raises(UserError, match=r"comparison\.docx: not the name of a figure; end it in one of .*\.png"):
        comparison.plot(tmp_path / "comparison.docx")


def test_runs_without_an_evaluation_have_no_figure(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "adaptive")
    history = pq.read_table(folder / "rounds.parquet").drop_columns(["test.hr@10"])
    pq.write_table(history, folder / "rounds.parquet")
    with pytest.raises(UserError, match="none of the runs measured"):
        compare([folder]).figure()


def test_a_run_shows_the_test_metric_of_the_round_that_was_best_on_validation(tmp_path: Path) -> None:
    best = {"validation.hr@10": {"value": 0.72, "round": 15}, "test.hr@10": {"value": 0.69, "round": 10}}
    result = Result.load(write_run(tmp_path / "run", best=best))
    assert result.chosen == (15, {"test.hr@10": pytest.approx(0.6841 * 15 / N_ROUNDS)})
    assert dict(result.summary())["test HR@10"] == "68.41 % (51.31 % in round 15, the best on validation)"
    assert Result.load(write_run(tmp_path / "none", best={})).chosen is None


@pytest.mark.parametrize("lower", [True, False])
def test_what_is_best_follows_the_direction_that_the_model_declares(tmp_path: Path, lower: bool) -> None:
    own = {"lower_is_better": ["misses"] if lower else []}
    few, many = (write_run(tmp_path / f"{n}", final={"test.misses": n}, **own) for n in (3.0, 7.0))
    text = compare([few, many]).results_table()
    assert {row for row, _ in text.bold} == {0 if lower else 1}


def test_the_result_of_a_run_in_two_columns(tmp_path: Path) -> None:
    table = pairs_table(Result.load(write_run(tmp_path / "adaptive")).summary())
    rows = dict(zip(table.columns[0].cells, table.columns[1].cells, strict=True))
    assert rows == {
        "test HR@10": "68.41 %",  # its best on test is not shown
        "test NDCG@10": "40.12 %",
        "validation HR@10": "70.10 %",
        "validation NDCG@10": "41.33 %",
        "uplink": "20.0 MB (160,000,000 bits)",
        "compression": "16.2x (full model: 324 MB)",
        "downlink": "1.00 GB",
        "total traffic": "1.02 GB",
        "simulated time": "1 h 23 min",
        "wall time": "1 min 23 s",
        "seed": "17",
        "model sha256": "0123456789ab",
    }
    assert "┃" not in printed(table)


def break_missing_folder(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def break_no_result(folder: Path) -> None:
    (folder / "config.yaml").touch()
    (folder / "result.json").unlink()


def break_no_rounds(folder: Path) -> None:
    (folder / "rounds.parquet").unlink()


def break_cut_result(folder: Path) -> None:
    path = folder / "result.json"
    path.write_text(path.read_text(encoding="utf-8")[:40], encoding="utf-8")


def break_result_key(folder: Path) -> None:
    path = folder / "result.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    del content["uplink_bits"]
    path.write_text(json.dumps(content), encoding="utf-8")


def break_cut_rounds(folder: Path) -> None:
    path = folder / "rounds.parquet"
    path.write_bytes(path.read_bytes()[:100])


def break_round_column(folder: Path) -> None:
    pq.write_table(pa.table({"round": [N_ROUNDS]}), folder / "rounds.parquet")


def break_last_rounds(folder: Path) -> None:
    history = pq.read_table(folder / "rounds.parquet")
    pq.write_table(history.slice(0, 12), folder / "rounds.parquet")


@pytest.mark.parametrize(
    ("break_run", "message"),
    [
        (break_missing_folder, "no such folder; give the folder of a run"),
        (break_no_result, r"has no result\.json, so it is not a finished run; .* --resume adaptive --output "),
        (break_no_rounds, r"has no rounds\.parquet, so it is not a finished run"),
        (break_cut_result, r"result\.json: unreadable .* --resume adaptive"),
        (break_result_key, r"result\.json: uplink_bits is missing"),
        (break_cut_rounds, r"rounds\.parquet: unreadable .*; run the experiment again"),
        (break_round_column, r"has no column total_uplink_bits, total_bits, simulated_seconds"),
        (break_last_rounds, r"ends at round 12 and result\.json at round 20"),
    ],
)
def test_a_run_that_is_not_whole_is_refused_in_one_line(break_run: Any, message: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "adaptive")
    break_run(folder)
    with pytest.raises(UserError, match=message) as caught:
        Result.load(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(UserError, match="no runs to compare"):
        compare([])


def write_coded(folder: Path, codec: str, hit_rate: float, uplink: int) -> Path:
    write_run(folder, hit_rate, algorithm="fedmf", uplink_bits=uplink, touched_uplink_bits=10**9)
    (folder / "config.yaml").write_text(f"algorithm: {{kind: fedmf, codec: {codec}}}\n")
    return folder


def test_traffic_against_three_baselines(tmp_path: Path) -> None:
    """The entropy-coded baseline has the fewest bits of those whose accuracy is level with float32."""
    chain = "[{kind: quantise, levels: 9}, {kind: entropy}]"
    folders = [
        write_coded(tmp_path / "float32", "[]", 0.680, 10**9),
        write_coded(tmp_path / "level", chain, 0.678, 10**8),
        write_coded(tmp_path / "finer", chain, 0.684, 2 * 10**8),
        write_coded(tmp_path / "coarse", chain, 0.670, 10**7),
        write_run(tmp_path / "ours", 0.68, uplink_bits=10**6),
        write_run(tmp_path / "elsewhere", 0.68, data="ml-100k"),
    ]
    comparison = compare(folders)
    assert comparison.coded_reference(comparison.runs[4]) is comparison.runs[1]
    assert comparison.coded_reference(comparison.runs[5]) is None
    table = comparison.table
    assert table.coded_ratio.tolist()[:5] == pytest.approx([10, 1, 2, 0.1, 0.01])
    assert table.touched_ratio.tolist()[:5] == pytest.approx([1, 0.1, 0.2, 0.01, 10**6 / 2_592_000_000])
    assert (table.total_bits == table.uplink_bits + table.downlink_bits).all()
    traffic = traffic_table(comparison.groups, comparison.coded_ratio)
    assert cells(terminal_table(traffic), 3) == ["coarse", "259.2x", "100.0x", "10.0x", "0.65x"]


def write_seeds(folder: Path, name: str, seeds: list[int], rates: list[float], **changes: Any) -> list[Path]:
    folders = []
    for seed, rate in zip(seeds, rates, strict=True):
        folders.append(write_run(folder / f"{name}-seed-{seed}", rate, seed=seed, **changes))
        config = (
            f"name: {name}-seed-{seed}\nseed: {seed}\ndata: {{kind: ml-1m, seed: null}}\nalgorithm: {{kind: {name}}}\n"
        )
        (folders[-1] / "config.yaml").write_text(config)
    return folders


def test_runs_that_differ_in_their_seeds_alone_are_one_row_with_mean_and_spread(tmp_path: Path) -> None:
    folders = write_seeds(tmp_path, "scolr", [0, 1, 2], [0.60, 0.62, 0.64])
    folders += write_seeds(tmp_path, "fedmf", [0, 1], [0.70, 0.70], algorithm="fedmf")
    comparison = compare(folders)
    assert [(each.label, len(each.runs)) for each in comparison.groups] == [
        ("scolr (3 seeds)", 3),
        ("fedmf (2 seeds)", 2),
    ]
    table = comparison.results_table()
    assert list(table.heads[:6]) == ["run", "algorithm", "data", "seeds", "rounds", "test\nHR@10"]
    assert [row[5] for row in table.rows] == ["62.00 ± 2.00 %", "70.00 ± 0.00 %"]
    assert table.bold == {(1, 5)}
    assert comparison.means["test.hr@10 std"].tolist() == pytest.approx([0.02, 0.0])
    assert len(comparison.table) == 5
    differences = differences_table(comparison.differences)
    assert differences is not None
    assert [list(differences.heads), *map(list, differences.rows)] == [
        ["run", "algorithm.kind"],
        ["scolr (3 seeds)", "scolr"],
        ["fedmf (2 seeds)", "fedmf"],
    ]
    one_by_one = Comparison(comparison.runs, by_seed=False)
    assert [each.label for each in one_by_one.groups] == one_by_one.labels()
    assert list(one_by_one.differences.index) == ["seed", "algorithm.kind"]


def test_a_band_is_one_standard_deviation_around_the_mean(tmp_path: Path) -> None:
    comparison = compare(write_seeds(tmp_path, "scolr", [0, 1, 2], [0.60, 0.62, 0.64]))
    figure = comparison.figure(["uplink"])
    (axes,) = figure.axes
    (line,), (band,) = axes.lines, axes.collections
    assert np.asarray(line.get_ydata())[-1] == pytest.approx(62)
    edges = band.get_paths()[0].vertices[:, 1]
    assert (edges.max(), edges.min()) == pytest.approx((64, 15 * 62 / 60 - 0.5), abs=1e-6)
    assert "standard deviation over seeds" in figure.get_suptitle().replace("\n", " ")


def test_runs_with_equal_seeds_are_no_repetitions(tmp_path: Path) -> None:
    folders = write_seeds(tmp_path / "a", "scolr", [0], [0.6]) + write_seeds(tmp_path / "b", "scolr", [0], [0.6])
    assert [len(each.runs) for each in compare(folders).groups] == [1, 1]
    assert differences_table(compare(folders).differences) is None


def test_a_lower_error_is_the_best(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, final={"test.rmse": value}) for name, value in (("a", 1.2), ("b", 0.9))]
    table = compare(folders).results_table()
    assert table.heads[4] == "test\nRMSE"
    assert ([row[4] for row in table.rows], table.bold) == (["1.2", "0.9"], {(1, 4)})


def test_the_axes_and_the_metric_of_the_figure_can_be_chosen(tmp_path: Path) -> None:
    comparison = compare([write_run(tmp_path / "a")])
    assert [each.get_xlabel() for each in comparison.figure(["time", "round"]).axes] == [
        "simulated time (min)",
        "round",
    ]
    for axes, metric, message in (
        (["bits"], None, "no axis 'bits'; known: round, uplink, total, time"),
        (None, "test.f1", 'no run has the metric "test.f1"; measured: test.hr@10'),
        (None, "test.hr@1", 'no run has the metric "test.hr@1"; measured: test.hr@10. Did you mean "test.hr@10"?'),
    ):
        with pytest.raises(UserError, match=message):
            comparison.figure(axes, metric)


def test_the_latex_table_escapes_what_tex_would_read(tmp_path: Path) -> None:
    folders = write_seeds(tmp_path, "scolr_8%", [0, 1], [0.60, 0.62])
    written = compare(folders).latex().splitlines()
    assert written[0] == r"\begin{tabular}{lllrrrrrrrrr}"  # wall time is left out
    assert written[4].startswith(r"scolr\_8\% (2 seeds) & scolr & ml-1m & 2 & 20 & \textbf{61.00 $\pm$ 1.41 \%} & ")
    assert written[4].endswith(r"\\")
    assert written[-1] == r"\end{tabular}"


def test_the_report_of_a_comparison_is_one_page_that_asks_for_nothing_else(tmp_path: Path) -> None:
    folders = write_seeds(tmp_path, "scolr", [0, 1], [0.60, 0.62]) + write_seeds(tmp_path, "<b>x</b>", [0], [0.5])
    path = compare(folders).report(tmp_path / "sent" / "report.html")
    page = path.read_text(encoding="utf-8")
    assert "61.00 ± 1.41 %" in page
    assert "<h2>Settings that differ</h2>" in page
    assert "&lt;b&gt;x&lt;/b&gt;" in page and "<b>x</b>" not in page
    assert page.count("<details>") == 6
    assert re.findall(r"(?:src|href)=.{11}", page) == ['src="data:image']
    assert "<script" not in page
    assert_is_png(page)


def assert_is_png(page: str) -> None:
    for packed in re.findall(r"base64,([^\"]+)", page):
        assert matplotlib.image.imread(io.BytesIO(base64.b64decode(packed))).shape[1] > 500


@pytest.mark.slow
def test_the_report_of_a_run_has_its_figures_and_its_configuration(tmp_path: Path) -> None:
    (folder,) = write_seeds(tmp_path, "scolr", [0], [0.6])
    rounds = pq.read_table(folder / "rounds.parquet")
    pq.write_table(rounds.append_column("loss", pa.array(np.ones(N_ROUNDS))), folder / "rounds.parquet")
    clients = {"round": [1, 1], "client": [0, 1], "rank": [1, 4], "uplink_bits": [8, 32]}
    pq.write_table(pa.table(clients | {"uplink_bits_per_second": [1e5, 1e6]}), folder / "clients.parquet")
    page = Result.load(folder).report(folder / "report.html").read_text(encoding="utf-8")
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert titles == [
        "Results",
        "Test metrics by round",
        "Test metrics against uplink",
        "Test metrics against total traffic",
        "Test metrics against simulated time",
        "Uplink of the clients",
        "Training loss",
        "Provenance",
    ]
    assert page.count("<img ") == 6
    assert_is_png(page)
    assert "kind: ml-1m" in page
    assert "0123456789abcdef" * 4 in page
    with pytest.raises(UserError, match=r"report\.pdf: not the name of a page; end it in \.html"):
        Result.load(folder).report(folder / "report.pdf")
