"""Finished runs compared with each other: tables, one figure and a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from narrowcast.platform.config import suggest
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking.metric_direction import lower_is_better
from narrowcast.platform.tracking.metric_labels import primary_metric
from narrowcast.runs import comparison_tables as tables
from narrowcast.runs.comparison_tables import measured_metrics
from narrowcast.runs.result import Result
from narrowcast.runs.run_comparison import RunComparison, saved_figure
from narrowcast.runs.run_settings import SEEDS, codec_kinds, differing_settings
from narrowcast.runs.seed_groups import SeedGroup, seed_groups

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from narrowcast.runs.paired_differences import PairedDifference
    from narrowcast.runs.text_table import Column, TextTable

_BASELINES = ("fedmf", "fedavg")
LEVEL = 0.003
"""Largest distance below the float32 baseline at which an accuracy counts as level with it."""


@dataclass(frozen=True)
class Comparison(RunComparison[Result]):
    """Finished runs, in the order given. With `by_seed`, runs that differ only in their seeds form one group.

    With `against`, the name of a group or of a run in it, the tables have the differences from it, seed by seed.
    """

    by_seed: bool = True
    against: str | None = None

    digest_column = "model_sha256"
    section = "data"

    def row_labels(self) -> list[str]:
        """Return the labels of the groups."""
        return [each.label for each in self.groups]

    def results_columns(self) -> dict[str, Column]:
        """Return the columns of the results by name, with a cell per group: final metrics, traffic and time."""
        return tables.results_columns(self)

    @property
    def caption(self) -> str:
        """The remark on runs of several data sets, empty for one."""
        return tables.different_data(self.runs)

    @cached_property
    def groups(self) -> list[SeedGroup]:
        """The runs in groups of those that differ in their seeds alone; one group per run without `by_seed`."""
        return seed_groups(self.runs, self.settings, self.labels(), by_seed=self.by_seed)

    @cached_property
    def differences(self) -> DataFrame:
        """One row per setting whose value is not the same in all groups, one column per group; seeds are left out."""
        from pandas import DataFrame, Index

        groups = self.groups
        paths = differing_settings([each.settings for each in groups])
        if self.by_seed:
            paths = [path for path in paths if path not in SEEDS]
        values = {each.label: [each.settings.get(path) for path in paths] for each in groups}
        return DataFrame(values, index=Index(paths, name="setting", dtype=object), dtype=object)

    @cached_property
    def table(self) -> DataFrame:
        """One row per run: what it is, the settings that differ, final metrics, bits, seconds, costs of targets.

        Bits and seconds are those of the whole run; `uplink_ratio` is uplink over that of the whole model in float32,
        `touched_ratio` over that of the changed rows in float32, `coded_ratio` over that of `coded_reference`.
        """
        from pandas import DataFrame

        differing = differing_settings(self.settings)
        rows = []
        for run, its_settings in zip(self.runs, self.settings, strict=True):
            targets = {f"rounds_to/{each.metric}/{each.value:g}": each.rounds_to for each in run.targets}
            rows.append(
                {
                    "algorithm": run.file.algorithm,
                    "data": run.file.data,
                    **{path: its_settings.get(path) for path in differing},
                    "rounds": run.file.rounds,
                    **run.final,
                    "uplink_bits": run.uplink_bits,
                    "uplink_ratio": run.uplink_bits / run.full_uplink_bits if run.full_uplink_bits else np.nan,
                    "touched_ratio": run.uplink_bits / run.touched_uplink_bits if run.touched_uplink_bits else np.nan,
                    "coded_ratio": self.coded_ratio(run),
                    "downlink_bits": run.downlink_bits,
                    "total_bits": run.total_bits,
                    "simulated_seconds": run.simulated_seconds,
                    "wall_seconds": run.wall_seconds,
                    **targets,
                    "model_sha256": run.model_sha256,
                }
            )
        return DataFrame(rows, index=self.labels())

    @cached_property
    def means(self) -> DataFrame:
        """One row per group: its number of seeds, the settings that differ, means, and standard deviations (n - 1).

        The standard deviation of a column is named after it, with ` std`; it is NaN for a single run.
        """
        from pandas import DataFrame

        rows = []
        for group in self.groups:
            row = {"seeds": len(group.runs), **dict(self.differences[group.label])}
            for name in (*(f"test.{each}" for each in measured_metrics(self.runs)), "uplink_bits", "total_bits"):
                row[name], row[f"{name} std"] = group.statistics(lambda run, name=name: self._value(run, name))  # type: ignore[misc]
            row["simulated_seconds"], row["simulated_seconds std"] = group.statistics(lambda run: run.simulated_seconds)
            rows.append(row)
        return DataFrame(rows, index=[each.label for each in self.groups])

    @staticmethod
    def _value(run: Result, name: str) -> float | None:
        return getattr(run, name) if name.endswith("_bits") else run.final.get(name)

    def coded_reference(self, run: Result) -> Result | None:
        """Return the entropy-coded baseline of a run's data: lossy coding that is level with float32, and no more.

        Of the runs of `fedmf` and `fedavg` on the same data whose codec ends in `entropy`, it is the one with the
        fewest uplink bits of those at most `LEVEL` below the float32 run of the same algorithm. None without such runs.
        """
        codecs = {each.folder: codec_kinds(its) for each, its in zip(self.runs, self.settings, strict=True)}
        of_data = [each for each in self.runs if each.file.data == run.file.data and each.file.algorithm in _BASELINES]
        plain = [each for each in of_data if not codecs[each.folder]]
        float32 = {each.file.algorithm: _primary(each) for each in plain}
        coded = [each for each in of_data if codecs[each.folder][-1:] == ["entropy"]]
        level = [each for each in coded if _primary(each) >= float32.get(each.file.algorithm, np.inf) - LEVEL]
        return min(level, key=_share_of_full, default=None)

    def coded_ratio(self, run: Result) -> float:
        """Return a run's uplink for each upload over that of its `coded_reference`; NaN if there is none."""
        reference = self.coded_reference(run)
        return np.nan if reference is None else _share_of_full(run) / _share_of_full(reference)

    def text_tables(self) -> dict[str, TextTable]:
        """Return the tables by title: settings that differ, results, metrics over clients, traffic, targets."""
        made = {
            "Settings that differ": tables.differences_table(self),
            "Results": self.results_table(),
            "Differences by seed": self._paired_table(),
            "Metrics over clients": tables.over_clients_table(self),
            "Traffic against baselines": tables.traffic_table(self),
            "Costs of targets": tables.targets_table(self),
        }
        return {title: table for title, table in made.items() if table is not None}

    def paired_differences(self, against: str | None = None, metrics: Sequence[str] | None = None) -> DataFrame:
        """Return one row per other group and metric: its mean difference from the reference over seeds of both.

        Columns: run, metric, pairs, difference, low and high (95 % by Student's t), p (paired t test of no difference)
        and p_holm (corrected for the number of groups). Shares are between 0 and 1.

        Args:
            against: the name of a group, of a run in it, or a pattern of such names; by default that of the comparison.
            metrics: such as `test.accuracy`; by default the chosen columns that are metrics, or all of the test split.

        Raises:
            UserError: there is no such group, or it was not measured so.

        """
        from pandas import DataFrame

        from narrowcast.runs.paired_differences import FIELDS

        wanted = self.against if against is None else against
        if wanted is None:
            raise UserError("name the group that the others are compared with, such as against='fedavg'")
        return DataFrame([vars(each) for each in self._paired(wanted, metrics)], columns=FIELDS)

    def _paired(self, against: str, metrics: Sequence[str] | None) -> list[PairedDifference]:
        from narrowcast.runs.paired_differences import paired_differences, reference_of

        known = dict.fromkeys(name for run in self.runs for name in run.final)
        chosen = [name for name in self.columns or () if name in known]
        usual = chosen or [name for each in measured_metrics(self.runs) if (name := f"test.{each}") in known]
        for name in metrics or ():
            if name not in known:
                raise UserError(f'no run has the metric "{name}"; measured: {", ".join(known)}{suggest(name, known)}')
        seeds = {run.folder: its for run, its in zip(self.runs, self.settings, strict=True)}
        return paired_differences(
            self.groups,
            reference_of(self.groups, against),
            list(metrics or usual),
            lambda run: tuple(str(seeds[run.folder].get(path, run.seed)) for path in SEEDS),
        )

    def _paired_table(self) -> TextTable | None:
        if self.against is None:
            return None
        from narrowcast.runs.paired_differences import differences_table, reference_of

        return differences_table(self._paired(self.against, None), reference_of(self.groups, self.against))

    def figure(self, axes: Sequence[str] | None = None, metric: str | None = None) -> Figure:
        """Return each group's metric against its costs, with bands of one standard deviation over the seeds.

        Args:
            axes: some of `round`, `uplink`, `total` and `time`; all that were recorded by default.
            metric: such as `test.accuracy`; the primary test metric of each run by default.

        """
        from narrowcast.runs.comparison_figure import comparison_figure

        return comparison_figure(self.groups, axes, metric)

    def clients_figure(self, path: str | Path | None = None, *, metric: str | None = None) -> Figure | None:
        """Return a metric's distribution over clients after the last evaluation: its value by percentile of clients.

        None if no run has evaluated its clients. With several seeds, a line is the mean over them.

        Args:
            path: file to which the figure is written too, in the format that its suffix names.
            metric: such as `test.accuracy`; by default that of the figure of a single run.

        """
        from narrowcast.runs.comparison_figure import clients_figure

        figure = clients_figure(self.groups, metric)
        return figure and saved_figure(figure, path)


def _primary(run: Result) -> float:
    """Return the primary metric, negated if it is better when lower."""
    name = primary_metric(run.final) or ""
    value = run.final.get(name, np.nan)
    return -value if lower_is_better(name, run.file.lower_is_better) else value


def _share_of_full(run: Result) -> float:
    return run.uplink_bits / run.full_uplink_bits if run.full_uplink_bits else np.nan
