"""Fields whose `kind` picks the class of their value: from the catalog, an entry point, or `package.module:Class`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel
from pydantic_core import PydanticCustomError, core_schema
from typing_extensions import is_protocol

from narrowcast.platform.config import plugins
from narrowcast.platform.config.fields import Matches
from narrowcast.platform.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Traits = TypeVar("Traits", bound="DataclassInstance")
FOLDERS = "plugin_folders"
"""Key of the validation context that holds the folders in which modules of `package.module:Class` are looked for."""
MARK = "x-registry"
"""Key of a JSON Schema that stands for all kinds of a registry."""
_OF_EVERY_MODEL = frozenset({"kind"})


def _folders_of(info: core_schema.ValidationInfo) -> Sequence[Path]:
    folders: Sequence[Path] = (info.context or {}).get(FOLDERS, ())
    return folders


def _imported(path: str, info: core_schema.ValidationInfo) -> str:
    plugins.load(path, _folders_of(info))
    return path


Factory = Annotated[
    str,
    Matches(r"[\w.]+:\w+", "should be package.module:name, such as my_models:make"),
    AfterValidator(_imported),
]
"""The import path of a function, which can be imported."""


@dataclass(frozen=True, eq=False)
class Registry(Mapping[str, type[BaseModel]]):
    """The classes that one `kind` can name: those of the catalog as a mapping, and any that satisfy the contract.

    The contract, `of`, and each class of the catalog are `module:Class` below `narrowcast`, imported when they are
    asked for. A field is typed with a registry as `Annotated[Contract, REGISTRY]`. It takes a section with a `kind`, a
    kind alone, or an object. `default` is the kind of a section that names none, and `needs` names what a class has
    besides the methods of its contract, as fields or properties. Values of classes from outside the catalog are written
    with the kind that finds the class again.
    """

    name: str
    of: str
    kinds: Mapping[str, str]
    default: str | None = None
    needs: frozenset[str] = frozenset()

    def __getitem__(self, kind: str) -> type[BaseModel]:
        return _loaded(self.kinds[kind])

    @property
    def contract(self) -> type:
        """The class that classes of this kind extend, or the protocol that they satisfy."""
        return _loaded(self.of)

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)

    def __hash__(self) -> int:
        return id(self)

    def is_extended_by(self, candidate: Any) -> bool:
        """Return whether a class extends the contract, or a class of the catalog."""
        bases = candidate.__mro__ if isinstance(candidate, type) else ()
        return any(base is self.contract or self._in_catalog(base) is not None for base in bases)

    def resolve(self, kind: str, folders: Iterable[Any] = ()) -> type[BaseModel]:
        """Return the class of a kind; raise `UserError` if there is none, or if it does not satisfy the contract."""
        if kind in self.kinds:
            return self[kind]
        if ":" in kind:
            return self.checked(plugins.load(kind, folders), kind)
        if (entry := plugins.entry_points(self.name).get(kind)) is not None:
            return self.checked(plugins.load_installed(entry), kind)
        raise UnknownKindError(kind, self.known())

    def known(self) -> list[str]:
        """Return the kinds that have a name: those of the catalog and of entry points."""
        return [*self.kinds, *plugins.entry_points(self.name)]

    def checked(self, candidate: Any, spec: str) -> type[BaseModel]:
        """Return the class, or raise `UserError` that says why it is not of this kind."""
        if self._in_catalog(candidate) is not None:
            return candidate
        article = "an" if self.name[0] in "aeiou" else "a"
        if not (isinstance(candidate, type) and issubclass(candidate, BaseModel)):
            raise UserError(f"{spec} is not a pydantic model, as {article} {self.name} has to be")
        is_base = not is_protocol(self.contract)
        if is_base and not issubclass(candidate, self.contract):
            raise UserError(f"{spec} is not {article} {self.name}: it has to extend {self.contract.__name__}")
        needed = candidate.__abstractmethods__ if is_base else members(self.contract) - _members_of(candidate)
        if missing := needed | (self.needs - _members_of(candidate)):
            raise UserError(f"{spec} is not {article} {self.name}: it lacks {', '.join(sorted(missing))}")
        if not candidate.model_config.get("frozen") or candidate.model_config.get("extra") != "forbid":
            raise UserError(f'{spec} needs model_config = ConfigDict(frozen=True, extra="forbid")')
        field = candidate.model_fields.get("kind")
        own_kind = "" if field is None else str(field.default)
        if field is None or own_kind in self.kinds:
            was = "has no kind" if field is None else f"has the kind {own_kind!r} of {self[own_kind].__name__}"
            raise UserError(f'{spec} {was}; give it its own, such as kind: Literal["mine"] = "mine"')
        return candidate

    def kind_of(self, model: BaseModel) -> str:
        """Return the kind that resolves to this object's class."""
        cls = type(model)
        if (kind := self._in_catalog(cls)) is not None:
            return kind
        spec = spec_of(cls)
        return next((kind for kind, entry in plugins.entry_points(self.name).items() if entry == spec), spec)

    def names(self) -> dict[str, str]:
        """Return the name of each class of the catalog by its kind, without importing it."""
        return {kind: listed.partition(":")[2] for kind, listed in self.kinds.items()}

    def summaries(self) -> dict[str, str]:
        """Return the first paragraph on each class of the catalog by its kind, from its source, without an import."""
        summaries = {}
        for kind, listed in self.kinds.items():
            module, _, name = listed.partition(":")
            text = _docstrings(f"{plugins.GROUP}.{module}")[name]
            summaries[kind] = text.partition("\n\n")[0].replace("\n", " ")
        return summaries

    def _in_catalog(self, candidate: Any) -> str | None:
        """Return the kind of a class of the catalog, None for any other object."""
        spec = spec_of(candidate) if isinstance(candidate, type) else ""
        return next((kind for kind, listed in self.kinds.items() if f"{plugins.GROUP}.{listed}" == spec), None)

    def class_of(self, value: Any, folders: Iterable[Any] = ()) -> type[BaseModel] | None:
        """Return the class that a section names, None if it names none."""
        try:
            kind = self._section(value).get("kind")
            return self.resolve(kind, folders) if isinstance(kind, str) else None
        except (ValueError, TypeError):
            return None

    def _section(self, value: Any) -> Mapping[str, Any]:
        if isinstance(value, str):
            return {"kind": value}
        if not isinstance(value, Mapping):
            raise PydanticCustomError("kind", "should be a kind, or a section with a kind")
        return {"kind": self.default, **value} if self.default and "kind" not in value else value

    def _read(self, value: Any, info: core_schema.ValidationInfo) -> BaseModel:
        if isinstance(value, BaseModel):
            try:
                plugins.record(self.checked(type(value), type(value).__qualname__).__module__)
            except UserError as error:
                raise PydanticCustomError("kind", "{problem}", {"problem": str(error)}) from error
            return value
        section = self._section(value)
        if "kind" not in section:
            known = ",".join(self.known())
            raise PydanticCustomError("kind_missing", "kind is missing; known: {known}", {"known": known})
        kind = str(section["kind"])
        try:
            cls = self.resolve(kind, _folders_of(info))
        except UnknownKindError as error:
            context = {"kind": kind, "known": ",".join(error.known)}
            raise PydanticCustomError("kind_unknown", "kind is unknown; known: {known}", context) from error
        except UserError as error:
            raise PydanticCustomError("kind_refused", "{problem}", {"problem": str(error), "kind": kind}) from error
        fields = {name: field_value for name, field_value in section.items() if name != "kind"}
        return cls.model_validate(fields, context=info.context)

    def _write(self, model: BaseModel, info: core_schema.SerializationInfo) -> dict[str, Any]:
        values = model.model_dump(mode=info.mode)
        # In the place that the class gives it, so that files written by earlier versions compare equal.
        return {**({} if "kind" in values else {"kind": ""}), **values, "kind": self.kind_of(model)}

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        """Return the schema of a field of this registry, for pydantic."""
        del source, handler
        return core_schema.with_info_plain_validator_function(
            self._read, serialization=core_schema.plain_serializer_function_ser_schema(self._write, info_arg=True)
        )

    def __get_pydantic_json_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        """Return a mark in place of the JSON Schema of all kinds, which `narrowcast.reference` defines once."""
        del source, handler
        return {MARK: self.name}


class UnknownKindError(UserError):
    """A kind that is neither in the catalog nor an entry point."""

    def __init__(self, kind: object, known: list[str]) -> None:
        super().__init__(f'kind = "{kind}" is unknown; known: {", ".join(known)}')
        self.known = known


def plain_values(value: Any) -> Any:
    """Return what a file would have in place of a Python value: objects as sections, paths as text, arrays as lists.

    Raise `UserError` for a value that a file cannot have, such as a function.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, BaseModel):
        fields = value.model_dump(mode="json")
        module = type(value).__module__
        if "kind" in fields and module.partition(".")[0] != plugins.GROUP:
            plugins.record(module)
            fields["kind"] = f"{module}:{type(value).__qualname__}"
        return fields
    if isinstance(value, Mapping):
        return {str(key): plain_values(entry) for key, entry in value.items()}
    if isinstance(value, Path):
        return str(value)
    if (listed := getattr(value, "tolist", None)) is not None:  # an array or a number of NumPy or torch
        return listed()
    if isinstance(value, Iterable):
        return [plain_values(entry) for entry in value]
    raise UserError(
        f"{value!r} is {type(value).__name__}, which no experiment file can have; give text, numbers, lists, mappings, "
        "paths, or objects of narrowcast's classes"
    )


def from_fields(traits: type[Traits], value: Any) -> Traits:
    """Return traits with the values of the fields that have their names, and the defaults of the others."""
    own = vars(value)
    return traits(**{trait.name: own[trait.name] for trait in fields(traits) if trait.name in own})


def kind_of(value: Any) -> str:
    """Return the kind of an object, or the name of its class."""
    return str(vars(value).get("kind", type(value).__name__))


def kind_in(section: Any) -> Any:
    """Return the kind that a section names, given as values or as an object; None for anything else."""
    values = vars(section) if isinstance(section, BaseModel) else section
    return values.get("kind") if isinstance(values, Mapping) else None


def _loaded(listed: str) -> Any:
    """Return the class of `module:Class` below `narrowcast`."""
    module, _, name = listed.partition(":")
    return getattr(import_module(f"{plugins.GROUP}.{module}"), name)


def members(contract: type) -> set[str]:
    """Return the names that a protocol asks for, without `kind`."""
    names: set[str] = set()
    for base in contract.__mro__:
        if base.__module__ not in ("typing", "builtins", "abc", "pydantic.main"):
            names |= {*vars(base), *vars(base).get("__annotations__", {})}
    return {name for name in names if not name.startswith("_")} - _OF_EVERY_MODEL - set(dir(BaseModel))


def spec_of(cls: type) -> str:
    """Return the `module:Class` of a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


@cache
def _docstrings(module: str) -> dict[str, str]:
    """Return the docstring of each class of a module, which is not imported."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, f"the catalog names {module}"
    classes = [node for node in ast.parse(Path(spec.origin).read_text()).body if isinstance(node, ast.ClassDef)]
    return {node.name: ast.get_docstring(node) or "" for node in classes}


def _members_of(candidate: Any) -> set[str]:
    fields = candidate.model_fields if isinstance(candidate, type) and issubclass(candidate, BaseModel) else ()
    return {*dir(candidate), *fields}
