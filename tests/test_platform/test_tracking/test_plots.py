from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from narrowcast.platform.rounds.ledger import NO_RANK
from narrowcast.platform.storage.journal import CLIENTS, ROUNDS
from narrowcast.platform.tracking.figures import (
    accuracy_figure,
    as_png,
    client_figure,
    figures_of_files,
    log_axis,
    loss_figure,
    new_figure,
    rank_colours,
    run_figures,
)
from narrowcast.platform.tracking.metrics import ROUND, TIME, UPLINK, Cost, running_mean

ALL_FIGURES = [
    *(f"accuracy_{cost}" for cost in ("round", "uplink", "total", "time")),
    "client_bits_ranks",
    "loss_time",
]


def rounds_table(n: int, *, every: int = 10, validation: bool = True, **columns: Any) -> pa.Table:
    index = np.arange(1, n + 1)
    evaluated = (index % every == 0) | (index == n)
    hit_rate = 0.7 - 0.5 * np.exp(-index / 20)
    values: dict[str, Any] = {
        "round": index,
        "loss": np.exp(-index / 50),
        "total_uplink_bits": index * 8_000_000,
        "total_bits": index * 48_000_000,
        "simulated_seconds": index * 15.0,
    }
    for split in ("validation", "test") if validation else ("test",):
        values[f"{split}.hr@10"] = pa.array(hit_rate, mask=~evaluated)
        values[f"{split}.ndcg@10"] = pa.array(0.6 * hit_rate, mask=~evaluated)
    return pa.table(values | columns)


def clients_table(n: int, ranks: list[int]) -> pa.Table:
    random = np.random.default_rng(7)
    rank = random.choice(ranks, n)
    rate = random.choice([0.3e6, 1.5e6, 8e6], n) * random.lognormal(0, 0.3, n)
    return pa.table({"rank": rank, "uplink_bits": rank * 40_000, "uplink_bits_per_second": rate})


def drawn(rounds: pa.Table, clients: pa.Table, folder: Path) -> dict[str, bytes]:
    """Draw the figures of tables as a run does, from their files."""
    places = {name: folder / name for name in (ROUNDS, CLIENTS)}
    for table, place in zip((rounds, clients), places.values(), strict=True):
        pq.write_table(table, place)
    return figures_of_files(places, "a run")


def assert_is_drawn(png: bytes) -> None:
    image = matplotlib.image.imread(BytesIO(png))
    assert image.shape[0] > 500
    assert image.shape[1] > 800
    assert image[..., :3].std() > 0.02, "a blank image"


@pytest.mark.parametrize(
    ("rounds", "ranks"),
    [
        (rounds_table(200), list(range(9))),
        (rounds_table(300, every=100, validation=False), [64]),
        (rounds_table(1), [0, 4]),
    ],
    ids=["adaptive", "one_rank", "one_round"],
)
def test_every_figure_of_a_run_is_a_png_with_something_on_it(
    rounds: pa.Table, ranks: list[int], tmp_path: Path
) -> None:
    figures = drawn(rounds, clients_table(600, ranks), tmp_path)
    assert list(figures) == ALL_FIGURES
    for png in figures.values():
        assert_is_drawn(png)


@pytest.mark.parametrize(
    "rounds",
    [
        rounds_table(20).drop_columns(["test.hr@10", "test.ndcg@10"]),
        rounds_table(20, **{"test.hr@10": pa.nulls(20), "test.ndcg@10": pa.nulls(20, pa.float64())}),
    ],
    ids=["no_column", "all_null"],
)
def test_without_an_evaluation_the_accuracy_figures_are_left_out(rounds: pa.Table, tmp_path: Path) -> None:
    assert list(drawn(rounds, clients_table(60, [8]), tmp_path)) == ALL_FIGURES[4:]


def test_a_run_of_which_nothing_was_measured_has_no_figures(tmp_path: Path) -> None:
    rounds = rounds_table(5, loss=np.full(5, np.nan)).drop_columns(["test.hr@10", "test.ndcg@10"])
    assert drawn(rounds, clients_table(60, [8]).slice(0, 0), tmp_path) == {}


def test_a_figure_is_the_same_file_as_matplotlibs_own_and_keeps_its_resolution() -> None:
    figure, other = (run_figures(rounds_table(40), clients_table(60, [8]), "a run")["loss_time"] for _ in range(2))
    before, expected = figure.dpi, BytesIO()
    other.savefig(expected, format="png", dpi=150)
    pixels = [
        matplotlib.image.imread(each)[..., :3] for each in (BytesIO(as_png(figure)), BytesIO(expected.getvalue()))
    ]
    assert np.array_equal(*pixels)
    assert figure.dpi == before


@pytest.mark.parametrize(
    ("cost", "label", "last"),
    [(UPLINK, "cumulative uplink (MB)", 200.0), (TIME, "simulated time (min)", 50.0)],
)
def test_accuracy_is_plotted_in_percent_against_a_cost_with_its_unit(cost: Cost, label: str, last: float) -> None:
    rounds = rounds_table(200)
    figure = accuracy_figure(rounds, cost, "a run: accuracy")
    assert figure is not None
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == (label, "HR@10 and NDCG@10 (%)")
    assert figure.get_suptitle() == "a run: accuracy"
    lines = {str(line.get_label()): line for line in axes.lines}
    assert set(lines) == {f"{m}, {split}" for m in ("HR@10", "NDCG@10") for split in ("test", "validation")}
    x, y = (np.asarray(values) for values in lines["HR@10, test"].get_data())
    assert len(x) == 20
    assert x[-1] == pytest.approx(last)
    final = rounds["test.hr@10"][199].as_py()
    assert y[-1] == pytest.approx(100 * final)
    assert f"{100 * final:.2f} %" in [text.get_text() for text in axes.texts]


def test_a_large_uplink_and_a_long_time_take_larger_units() -> None:
    rounds = rounds_table(1000, every=100, total_uplink_bits=np.arange(1, 1001) * 80_000_000)
    labels = []
    for cost in (UPLINK, TIME):
        figure = accuracy_figure(rounds, cost, "a run")
        assert figure is not None
        labels.append(figure.axes[0].get_xlabel())
    assert labels == ["cumulative uplink (GB)", "simulated time (h)"]


def test_nothing_spent_is_drawn_at_zero() -> None:
    rounds = rounds_table(3, total_uplink_bits=[0, 0, 0], simulated_seconds=[0.0, 0.0, 0.0])
    for figure in (accuracy_figure(rounds, UPLINK, "a run"), loss_figure(rounds, "a run")):
        assert figure is not None
        assert figure.axes[0].get_xlim() == (0, 1)


def test_no_text_of_a_figure_leaves_it_or_meets_another() -> None:
    figure = accuracy_figure(rounds_table(200), UPLINK, "a run: " + "a long title " * 9)
    assert figure is not None
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in (*axes.texts, *figure.texts)]
    boxes += [legend.get_window_extent() for legend in figure.legends]
    boxes += [axes.xaxis.label.get_window_extent(), axes.yaxis.label.get_window_extent()]
    for index, box in enumerate(boxes):
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.width
        assert box.y1 <= figure.bbox.height
        assert not box.count_overlaps(boxes[index + 1 :])


def test_bars_are_the_shares_of_the_ranks_and_points_the_participations() -> None:
    clients = pa.table(
        {
            "rank": [0, 2, 2, 8],
            "uplink_bits": [0, 80_000, 88_000, 400_000],
            "uplink_bits_per_second": [1e5, 1e6, 2e6, 8e6],
        }
    )
    figure = client_figure(clients, "a run")
    assert figure is not None
    bars, points = figure.axes
    assert [patch.get_height() for patch in bars.patches] == [25.0, 50.0, 25.0]  # type: ignore[attr-defined]
    assert [label.get_text() for label in bars.get_xticklabels()] == ["0", "2", "8"]
    assert (bars.get_xlabel(), bars.get_ylabel()) == ("rank (0: nothing sent)", "share of participations (%)")
    (drawn,) = points.collections
    assert np.asarray(drawn.get_offsets()).tolist() == [[0.1, 0.0], [1.0, 10.0], [2.0, 11.0], [8.0, 50.0]]
    assert drawn.get_rasterized()
    assert points.get_xscale() == "log"
    assert points.get_xlabel() == "client's uplink rate (Mbit/s)"
    assert points.get_ylabel() == "uplink per participation (kB)"
    colours = [tuple(patch.get_facecolor()[:3]) for patch in bars.patches]
    seen = [tuple(colour[:3]) for colour in np.asarray(drawn.get_facecolor())]
    assert seen == [colours[0], colours[1], colours[1], colours[2]]


def test_rates_that_a_log_axis_cannot_show_are_left_out() -> None:
    clients = pa.table({"rank": [1] * 4, "uplink_bits": [8] * 4, "uplink_bits_per_second": [np.inf, 0.0, 1e6, 2e6]})
    figure = client_figure(clients, "a run")
    assert figure is not None
    figure.draw_without_rendering()
    (points,) = figure.axes
    assert np.asarray(points.collections[0].get_offsets())[:, 0].tolist() == [1, 2]


def test_participations_that_are_all_alike_have_no_figure() -> None:
    same = {"rank": [NO_RANK] * 3, "uplink_bits": [80_000] * 3, "uplink_bits_per_second": [1e6] * 3}
    assert client_figure(pa.table(same), "a run") is None
    figure = client_figure(pa.table(same | {"rank": [1, 2, 2]}), "a run")
    assert figure is not None
    assert [axes.get_ylabel() for axes in figure.axes] == ["share of participations (%)"]


def test_a_metric_that_is_no_share_has_a_panel_of_its_own_in_its_own_scale() -> None:
    rounds = rounds_table(20, validation=False, **{"test.rmse": np.linspace(3, 2, 20), "test.loss": np.ones(20)})
    figure = accuracy_figure(rounds, ROUND, "a run")
    assert figure is not None
    shares, errors = figure.axes
    assert (shares.get_ylabel(), errors.get_ylabel()) == ("HR@10 and NDCG@10 (%)", "RMSE")
    assert shares.get_xlabel() == errors.get_xlabel() == "round"
    (line,) = errors.lines
    assert np.asarray(line.get_ydata())[-1] == 2
    assert [text.get_text() for text in errors.texts] == ["2"]
    alone = accuracy_figure(rounds.select(["round", "test.loss"]), ROUND, "a run")
    assert alone is not None and alone.axes[0].get_ylabel() == "loss"


def test_a_crowd_is_fainter_than_a_rare_rank() -> None:
    clients = pa.concat_tables([clients_table(60_000, [8]), clients_table(10, [0])])
    figure = client_figure(clients, "a run")
    assert figure is not None
    alpha = np.asarray(figure.axes[1].collections[0].get_facecolor())[:, 3]
    assert alpha[0] < 0.2
    assert alpha[-1] == pytest.approx(0.8)


def test_many_ranks_are_labelled_sparsely() -> None:
    figure = client_figure(clients_table(5000, list(range(65))), "a run")
    assert figure is not None
    assert len(figure.axes[0].patches) == 65
    assert len(figure.axes[0].get_xticks()) <= 12


def test_rank_zero_has_a_colour_of_its_own() -> None:
    with_zero, without = rank_colours(np.array([0, 1, 8])), rank_colours(np.array([1, 8]))
    assert np.array_equal(with_zero[1:], without)
    assert with_zero[0, 0] > 0.8
    assert len(np.unique(with_zero, axis=0)) == 3


def test_a_round_without_a_loss_leaves_no_gap() -> None:
    loss = np.linspace(1, 0.5, 100)
    loss[[0, 50, 99]] = np.nan
    figure = loss_figure(rounds_table(100, loss=loss), "a run")
    assert figure is not None
    raw, mean = figure.axes[0].lines
    assert len(np.asarray(raw.get_ydata())) == 97
    assert np.isfinite(np.asarray(mean.get_ydata())).all()
    assert figure.axes[0].get_xlabel() == "simulated time (min)"


def test_a_running_mean_is_centred_and_cut_at_the_ends() -> None:
    assert running_mean(np.array([3.0, 0.0, 6.0, 9.0]), 3).tolist() == [1.5, 3.0, 5.0, 7.5]


def test_a_log_axis_has_plain_numbers() -> None:
    figure, (axes,) = new_figure("a title", panels=1)
    log_axis(axes, np.array([1.0, 20_000.0]))
    figure.draw_without_rendering()
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert {"1", "10", "10,000"} <= set(labels)
    assert not axes.xaxis.get_minorticklocs().size
