"""Arrays in pickles, read without an unpickler: those of Planetoid, of NumPy's files of one object, and of images.

A pickle names functions that are called while it is read, and some of those of arrays take pointers, so that a file
from the web may run any code. Here the opcodes of a file make nothing but numbers, strings, lists and records of what
was named; the arrays are made from those records afterwards, by types on a list and with checked sizes.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.platform.storage.disk import readable

_OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}
ADVICE = "download the file again"
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError, OverflowError)
"""Errors of pickletools and NumPy on damaged files."""
SPARSE_MATRIX, _LISTS = "scipy.sparse.csr csr_matrix", "collections defaultdict"
_ARRAY, _TYPE, _BYTES = "numpy.core.multiarray _reconstruct", "numpy dtype", "_codecs encode"
_NAMES = {SPARSE_MATRIX, _LISTS, _ARRAY, _TYPE, _BYTES, "numpy ndarray", "__builtin__ list"}
_TYPES = {name: np.dtype(f"<{name}") for name in ("u1", "i4", "i8", "f4", "f8")}
_OBJECTS = "O8"


@dataclass(frozen=True)
class _Name:
    """A name in a pickle, which stands for nothing."""

    name: str


@dataclass(eq=False)
class Record:
    """An object as a pickle describes it: the name that it calls, the arguments, and the state that it sets."""

    name: str
    arguments: Any
    state: Any = None


_MARK = _Name("")


def read_pickle(path: Path, header: bytes = b"") -> Any:
    """Return what the pickle in a file describes, after a header; raise `UserError` if that is none of the above."""
    with readable(path, UNREADABLE, ADVICE), path.open("rb") as file:
        if file.read(len(header)) != header:
            raise ValueError("does not begin as its kind of file does")
        return _tree(file)


def size_of(value: Any) -> int:
    """Return a number that counts something; raise `ValueError` for another value."""
    if type(value) is not int or value < 0:
        raise ValueError("a size is not a number")
    return value


def array_of(record: Any) -> NDArray[Any]:
    """Return the array that a record describes: version 1, shape, type, order and bytes.

    Raise `ValueError`, `LookupError`, `TypeError` or `AttributeError` if it describes none of numbers.
    """
    shape, type_, by_columns, content = _state_of_array(record)
    sizes = list(map(size_of, shape))
    name = type_.arguments[0]
    if type(name) is not str or name not in _TYPES:
        raise ValueError(f"an array has a type that is not one of {', '.join(_TYPES)}")
    if type_.state != (3, "|" if name == "u1" else "<", None, None, None, -1, -1, 0):  # a byte has no order
        raise ValueError("an array has a type that is not one of numbers in little-endian order")
    values = np.frombuffer(_bytes_of(content), _TYPES[name])
    return values.reshape(sizes, order="F" if by_columns is True else "C")


def object_of(record: Any) -> Any:
    """Return the value in an array of one object, as `numpy.save` writes a dictionary."""
    _, type_, _, content = _state_of_array(record)
    if type_.arguments[0] != _OBJECTS or type(content) is not list or len(content) != 1:
        raise ValueError("is not an array of one object")
    return content[0]


def _state_of_array(record: Any) -> tuple[Any, Record, Any, Any]:
    """Return shape, type, order and content of an array."""
    if not (isinstance(record, Record) and record.name == _ARRAY and isinstance(record.state, tuple)):
        raise ValueError("is not an array")
    version, shape, type_, by_columns, content = record.state
    if version != 1 or not isinstance(type_, Record) or type_.name != _TYPE:
        raise ValueError("an array has no version 1, or no type")
    return shape, type_, by_columns, content


def _bytes_of(content: Any) -> bytes:
    """Return bytes, which Python 2 pickles as text, and Python 3 as text to be encoded for protocol 2, or as bytes."""
    if type(content) is bytes:
        return content
    if isinstance(content, Record) and content.name == _BYTES:
        content, encoding = content.arguments
        if encoding != "latin1":
            raise ValueError("has bytes of an encoding that is not latin1")
    encoded: bytes = content.encode("latin1")
    return encoded


def _opcodes(file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    """Yield the names and arguments of a pickle's opcodes, as `pickletools.genops` does.

    That decodes escapes in lines of text, and warns of those that Python does not know; the lines of names have none.
    """
    while code := file.read(1):
        opcode = _OPCODES[code.decode("latin-1")]
        argument = opcode.arg
        if opcode.name == "GLOBAL":
            yield opcode.name, " ".join(file.readline().decode("ascii").rstrip("\n") for _ in range(2))
        elif argument is not None and argument.name.startswith("stringnl"):
            raise ValueError(f"has the opcode {opcode.name}, which none of these files needs")
        else:
            yield opcode.name, None if argument is None else argument.reader(file)


def _tree(file: IO[bytes]) -> Any:  # noqa: PLR0912 - a branch for each opcode
    """Return what a pickle describes, made of numbers, strings, tuples, lists, dictionaries and records alone.

    Raise `ValueError`, `LookupError` or `TypeError` for anything else.
    """
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for name, argument in _opcodes(file):
        match name:
            case "PROTO":
                pass
            case "BININT" | "BININT1" | "BININT2" | "SHORT_BINSTRING" | "BINSTRING" | "BINUNICODE":
                stack.append(argument)
            case "SHORT_BINBYTES" | "BINBYTES":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "EMPTY_TUPLE" | "EMPTY_LIST" | "EMPTY_DICT":
                stack.append({"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}[name]())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack[-int(name[-1]) :] = [tuple(stack[-int(name[-1]) :])]
            case "MARK":
                stack.append(_MARK)
            case "TUPLE":
                stack.append(tuple(_since_mark(stack)))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                stack.append(_named(argument))
            case "REDUCE" | "NEWOBJ":
                arguments, called = stack.pop(), _expect(stack.pop(), _Name)
                stack.append({} if called.name == _LISTS else Record(called.name, arguments))
            case "BUILD":
                state = stack.pop()
                _expect(stack[-1], Record).state = state
            case "APPEND" | "APPENDS":
                values = [stack.pop()] if name == "APPEND" else _since_mark(stack)
                _expect(stack[-1], list).extend(values)
            case "SETITEM" | "SETITEMS":
                values = [stack.pop(-2), stack.pop()] if name == "SETITEM" else _since_mark(stack)
                if not all(type(key) in (int, str) for key in values[::2]):  # others may take for ever to hash
                    raise ValueError("has a key that is neither a number nor a name")
                _expect(stack[-1], dict).update(zip(values[::2], values[1::2], strict=True))
            case "STOP":
                return stack.pop()
            case other:
                raise ValueError(f"has the opcode {other}, which none of these files needs")
    raise ValueError("has no end")


def _named(name: Any) -> _Name:
    if name not in _NAMES:
        raise ValueError(f"names {name.replace(' ', '.'):.100}, which is not part of an array")
    return _Name(name)


def _since_mark(stack: list[Any]) -> list[Any]:
    """Remove and return the values after the last mark, and the mark."""
    mark = len(stack) - 1
    while stack[mark] is not _MARK:
        mark -= 1
    values = stack[mark + 1 :]
    del stack[mark:]
    return values


def _expect(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value
