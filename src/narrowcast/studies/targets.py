"""Papers: folders with a `targets.yaml`, found beside the current folder, by `--papers` or as installed packages.

Listing targets reads the YAML files alone. Loading one imports the Python file that its `entry` names, whose code then
runs as that of a script does; a target with a `comparison` has no code of its own.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from narrowcast.platform.config.files import Section, suggest, validate
from narrowcast.platform.config.plugins import said
from narrowcast.platform.config.yaml import read_yaml
from narrowcast.platform.errors import UserError
from narrowcast.studies.spec import Comparison

if TYPE_CHECKING:
    from narrowcast.studies.tables import Table

GROUP = "narrowcast.papers"
"""The group of entry points; the value is a package whose folder has papers."""
FILE, RESULTS, FOLDER = "targets.yaml", "results", Path("papers")


class TargetFields(Section):
    """A table or figure in `targets.yaml`. `takes`: time on 2 cores. `notes`: assumptions of the verdicts."""

    what: str
    takes: str
    source: str | None = Field(None, description="in place of the paper's, if this target has another one")
    notes: tuple[str, ...] = ()
    entry: str | None = Field(None, description="module:name of a table, or of the verdicts on a comparison")
    comparison: Comparison | None = None

    @model_validator(mode="after")
    def _has_a_table(self) -> TargetFields:
        if self.entry is None and self.comparison is None:
            raise ValueError("give entry, such as table:TABLE, or comparison, or both")
        return self


class PaperFields(Section):
    """A `targets.yaml`; `source` is the paper."""

    source: str
    targets: dict[str, TargetFields]


@dataclass(frozen=True)
class Target:
    """A table or figure of the paper in `folder`, whose modules are imported as `package.module` from `root`."""

    name: str
    source: str
    fields: TargetFields
    folder: Path
    root: Path

    @property
    def title(self) -> str:
        """The name and the contents in one line."""
        return f"{self.name}: {self.fields.what}"

    @property
    def notes(self) -> tuple[str, ...]:
        """The source and the assumptions."""
        return (f"Source: {self.source}.", *self.fields.notes)

    @property
    def results(self) -> Path:
        """The folder with the CSV files of finished runs."""
        return self.folder / RESULTS

    def table(self) -> Table:
        """Return the table; this runs code of the paper. Raise `UserError` if the file or the name is not there."""
        from narrowcast.studies.comparison import ComparisonVerdicts, table_of
        from narrowcast.studies.tables import MeasuredTable, RecordedTable, StudyTable

        if self.fields.comparison is not None and self.fields.entry is None:
            return table_of(self.fields.comparison, self.name)
        module, _, name = str(self.fields.entry).partition(":")
        path = ".".join([*self.folder.relative_to(self.root).parts, module])
        if str(self.root) not in sys.path:
            sys.path.insert(0, str(self.root))
        try:
            table = vars(importlib.import_module(path)).get(name)
        except (Exception, SystemExit) as error:  # whatever code of others raises
            raise UserError(f"{self.folder / FILE}: {self.name}.entry: {said(error)}") from error
        if self.fields.comparison is not None:
            if not isinstance(table, ComparisonVerdicts):
                raise UserError(f"{self.folder / FILE}: {self.name}.entry: {path} has no ComparisonVerdicts {name}")
            return table_of(self.fields.comparison, self.name, table)
        if not isinstance(table, RecordedTable | StudyTable | MeasuredTable):
            raise UserError(f"{self.folder / FILE}: {self.name}.entry: {path} has no table {name}")
        return table


def find_targets(papers: Path | None = None) -> dict[str, Target]:
    """Return the targets by name, of `papers` alone if it is given, else of ./papers and of installed packages.

    Of two targets of one name the first is taken. Raise `UserError` for a file that is not valid, or if `papers` has
    none.
    """
    targets: dict[str, Target] = {}
    for root, file in _files(papers):
        for target in _read(root, file):
            targets.setdefault(target.name, target)
    if papers is not None and not targets:
        raise UserError(f"--papers {papers}: no {FILE} in this folder, nor in those in it")
    return targets


def find_target(name: str, targets: Mapping[str, Target]) -> Target:
    """Return the target of this name; raise a `UserError` that lists the targets if there is none."""
    check_any(targets)
    if name not in targets:
        raise UserError(f'no table or figure "{name}"; there are: {", ".join(targets)}{suggest(name, targets)}')
    return targets[name]


def check_any(targets: Mapping[str, Target]) -> None:
    """Raise a `UserError` that says where papers come from if there are none."""
    if not targets:
        raise UserError(
            f"no papers here: pip install narrowcast-papers, or give a folder with a {FILE} by --papers DIR"
        )


def _files(papers: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yield the files of targets, each with the folder that its modules are imported from."""
    folder = FOLDER if papers is None else papers
    for pattern in (FILE, f"*/{FILE}", f"*/*/{FILE}"):
        yield from ((folder.resolve(), file.resolve()) for file in sorted(folder.glob(pattern)))
    if papers is None:
        for point in importlib.metadata.entry_points(group=GROUP):
            spec = importlib.util.find_spec(point.value.partition(".")[0])  # which does not import a top-level package
            for package in (spec.submodule_search_locations or ()) if spec else ():
                yield from ((Path(package).parent, file) for file in sorted(Path(package).glob(f"*/{FILE}")))


def _read(root: Path, file: Path) -> Iterator[Target]:
    paper = validate(PaperFields, read_yaml(file.read_text(), str(file)), str(file))
    for name, fields in paper.targets.items():
        yield Target(name, fields.source or paper.source, fields, file.parent, root)
