"""Reads a pickle as plain data: nothing in it is imported, looked up or called.

torch writes the metadata of a checkpoint, and the shape of each stored tensor, as pickles. A pickle names functions,
and Python's own reader calls them, so a foreign checkpoint could run any code. Here a name stays a name, and a call is
only recorded: ``Name("torch.Size")`` applied to ``((4, 3),)`` becomes ``Record("torch.Size", ((4, 3),))``. The caller
decides which of them it understands. Only the opcodes that torch's pickles need are known. What is read takes memory
in proportion to the pickle's length.

Called by ``stored_metadata.py`` and ``stored_items.py``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PYTHONS: Any = pickle._Unpickler  # pyright: ignore[reportAttributeAccessIssue] - Python's own, written in Python
"""The C version can't be restricted to some opcodes. A few bytes of others make it allocate gigabytes."""

PERSISTENT = "persistent id"
"""Kind of the record of an object that is stored outside of the pickle."""

_KNOWN = (
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2",
    "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "MEMOIZE",
    "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS",
    "GLOBAL", "STACK_GLOBAL", "BINPERSID",
)  # fmt: skip
"""Opcodes that are read as Python does. ``_OWN`` has the others."""


class UnreadablePickleError(ValueError):
    """The bytes are no pickle, or one with another content than plain data, names and records."""


@dataclass(frozen=True, slots=True)
class Name:
    """A class, function or value that a pickle names: ``module.name``."""

    path: str


@dataclass(eq=False, slots=True)
class Record:
    """An object that a pickle describes.

    Attributes:
        kind: the path of its class, or of the function that would make it.
        content: the object's state, or the function's arguments as a tuple.
    """

    kind: str
    content: Any = None


def read_pickle(data: bytes) -> Any:
    """Return the content of a pickle: None, bool, int, str, list, tuple, dict, ``Name`` and ``Record``.

    The keys of dicts are str or ``Record``.

    Raises:
        UnreadablePickleError: ``data`` is no such pickle.
    """
    try:
        return _Reader(io.BytesIO(data)).load()
    except UnreadablePickleError:
        raise
    except Exception as error:  # damaged bytes make Python's reader fail in any way
        raise UnreadablePickleError(f"{type(error).__name__}: {error}") from error


class _Reader(_PYTHONS):
    """Python's reader of pickles, restricted to ``_KNOWN`` and ``_OWN``."""

    def find_class(self, module: str, name: str) -> Name:
        return Name(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Record:
        return Record(PERSISTENT, pid)

    def _new_object(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(name) is not Name or type(arguments) is not tuple or arguments:
            raise UnreadablePickleError("an object is made from something other than a class")
        self.append(Record(name.path))

    def _call(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(name) is not Name or type(arguments) is not tuple:
            raise UnreadablePickleError("something other than a named function is called")
        self.append(Record(name.path, arguments))

    def _build(self) -> None:
        content, record = self.stack.pop(), self.stack[-1]
        if type(record) is not Record or record.content is not None:
            raise UnreadablePickleError("something other than a new object gets a state")
        record.content = content

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def _set_items(self) -> None:
        self._update(self.pop_mark())

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        # Hashing a tuple of many levels would end the process.
        if type(target) is not dict or not all(type(key) in (str, Record) for key in items[::2]):
            raise UnreadablePickleError("expected a dict with keys of type str, or objects")
        target.update(zip(items[::2], items[1::2], strict=True))


_OWN: dict[bytes, Callable[[Any], None]] = {
    pickle.NEWOBJ: _Reader._new_object,
    pickle.REDUCE: _Reader._call,
    pickle.BUILD: _Reader._build,
    pickle.SETITEM: _Reader._set_item,
    pickle.SETITEMS: _Reader._set_items,
}


def _refuse(reader: Any) -> None:
    raise UnreadablePickleError("it has an opcode that torch does not write")


_Reader.dispatch = {
    **dict.fromkeys(range(256), _refuse),
    **{getattr(pickle, name)[0]: _PYTHONS.dispatch[getattr(pickle, name)[0]] for name in _KNOWN},
    **{opcode[0]: method for opcode, method in _OWN.items()},
}
