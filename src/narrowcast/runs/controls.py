"""The controls of methods whose clients have models of their own: training alone, and fine-tuning the global model.

On splits in which each client has few classes, training alone is often better than every method that shares, and
fine-tuned FedAvg is hard to beat elsewhere (`docs/methods/personal.md`). A control of a run is a run of `local` or
`fine_tune` on the same data whose settings differ in the algorithm alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowcast.platform.config.files import command
from narrowcast.platform.config.trust import read_json
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking.metrics import MEAN, clients_metric, format_metric, is_better, metric_label
from narrowcast.runs.folder import CONFIG, RESULT, SEEDS, settings_of, without_seed
from narrowcast.runs.result import Result

if TYPE_CHECKING:
    from narrowcast.runs.comparison_tables import SeedGroup

CONTROLS = {"local": "training alone", "fine_tune": "fine-tuned FedAvg"}
"""The controls by the kind of their algorithm."""
_WITHOUT_EFFECT = re.compile(r"(algorithm|targets|evaluate_every|checkpoint_\w+)(\.|$)")
Settings = Mapping[Path, Mapping[str, Any]]
"""The settings of runs by dotted path, by the runs' folders."""


def controls_beside(runs: Sequence[Result]) -> list[Result]:
    """Return the finished controls of these runs that lie in the same folders, where there is none among the runs.

    Of several alike it is the first by name.
    """
    compared = [run for run in runs if _has_controls(run)]
    keys = {_key(run, settings_of(run.folder)) for run in compared}
    wanted = {(kind, key) for kind in CONTROLS for key in keys}
    wanted -= {(run.file.algorithm, _key(run, settings_of(run.folder))) for run in runs if _is_control(run)}
    controls = []
    for parent in dict.fromkeys(run.folder.parent for run in compared):
        for run in _finished(parent):
            if (role := (run.file.algorithm, _key(run, settings_of(run.folder)))) in wanted:
                wanted.remove(role)
                controls.append(run)
    return controls


def _has_controls(run: Result) -> bool:
    """Return whether a run has clients with models of their own, which were measured, and is no control itself."""
    measured = clients_metric(run.final) is not None and (run.folder / CONFIG).is_file()
    return run.file.personal and run.file.algorithm not in CONTROLS and measured


def _is_control(run: Result) -> bool:
    return run.file.algorithm in CONTROLS and clients_metric(run.final) is not None


def _finished(parent: Path) -> Iterator[Result]:
    """Yield the finished controls of a folder, by their names; damaged ones are left out."""
    for path in sorted(parent.glob(f"*/{RESULT}")):
        with suppress(UserError):
            kind = read_json(path, "leave it out").get("algorithm")
            if kind in CONTROLS and _is_control(control := Result.load(path.parent)):
                yield control


def _key(run: Result, settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a run shares with its controls: its data, and all settings that matter but those of the algorithm."""
    kept = sorted((path, str(value)) for path, value in settings.items() if not _WITHOUT_EFFECT.match(path))
    return (run.file.data, run.file.data_sha256, *kept)


def remarks(groups: Sequence[SeedGroup], settings: Settings, added: Sequence[str]) -> list[str]:
    """Return a line about runs that were added, and for each group those about controls: missing, or better."""
    lines = [f"Controls in the same folder, added: {', '.join(added)}."] if added else []
    controls: dict[str, dict[Any, Result]] = {kind: {} for kind in CONTROLS}
    for run in (run for group in groups for run in group.runs if _is_control(run)):
        controls[run.file.algorithm].setdefault(_key(run, settings[run.folder]), run)
    for group in groups:
        if not all(map(_has_controls, group.runs)):
            continue
        for kind, by_key in controls.items():
            beside = [(run, by_key.get(_key(run, settings[run.folder]))) for run in group.runs]
            if missing := [run for run, control in beside if control is None]:
                lines.append(_missing(group, missing, kind, settings))
            pairs = [(run, control) for run, control in beside if control is not None]
            lines += _better(group, pairs, kind) if pairs else []
    return lines


def _missing(group: SeedGroup, runs: Sequence[Result], kind: str, settings: Settings) -> str:
    """Return the line with the command that runs a control that is not there."""
    first = runs[0]
    name = f"{without_seed(first.name)}-{kind}"
    words = [first.folder / CONFIG, f"algorithm={kind}", f"name={name}", *_replicas([settings[r.folder] for r in runs])]
    output = [] if str(first.folder.parent) == "runs" else ["--output", first.folder.parent]
    return f"{group.label} stands without {CONTROLS[kind]} ({kind}): {command('run', *words, *output)}"


def _replicas(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the seeds of several runs as an override; nothing for one."""
    differing = {path: [of_run.get(path) for of_run in settings] for path in SEEDS}
    return [
        f"replicas.{path}=[{','.join(map(str, values))}]"
        for path, values in differing.items()
        if len(set(values)) == len(values) > 1
    ][:1]


def _better(group: SeedGroup, pairs: Sequence[tuple[Result, Result]], kind: str) -> list[str]:
    """Return the line that says so if the clients of a control are better off, in the mean over the seeds of both."""
    metric = clients_metric(group.runs[0].final)
    ours, theirs = (
        sum(run.final.get(f"{metric}.{MEAN}", float("nan")) for run in runs) / len(runs)
        for runs in zip(*pairs, strict=True)
    )
    if metric is None or not is_better(metric, theirs, ours, group.runs[0].file.lower_is_better):
        return []
    shown, than = (format_metric(metric, value, group.shares) for value in (ours, theirs))
    name = without_seed(pairs[0][1].name)
    return [
        f"{group.label} is worse than {CONTROLS[kind]} ({name}): {metric_label(metric)} of clients {shown}, not {than}"
    ]
