"""Which key of ``METRIC_KEYS`` describes a key of a row, and which keys the source writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from async_rl.run.records.metric_table import METRIC_KEYS

_METRIC = re.compile(r"[a-z_]+(/[\w*]+)+")


def declared_key(key: str) -> str | None:
    """The key itself, or the one whose ``N`` and ``<name>`` stand for parts of it; None if nothing declares it.

    In ``key`` a ``*`` stands for any text.
    """
    if key in METRIC_KEYS:
        return key
    for declared in METRIC_KEYS:
        pattern = re.sub(r"_N(?=/|$)", r"_(\\d+|[*])", re.sub(r"<\w+>", "[^/]+", declared))
        if re.fullmatch(pattern, key) or ("*" in key and re.fullmatch(key.replace("*", ".+"), declared)):
            return declared
    return None


def undeclared(source: str) -> list[str]:
    """The metrics that a Python source writes and ``METRIC_KEYS`` does not have.

    What is written as a key of a dict is a metric if it has the form ``a/b``, and so is every other key that is text in
    a function that writes a declared one of this form. A ``*`` stands for a variable part.
    """
    if not re.search(r"[\"'][a-z_]+/", source):
        return []  # to parse all sources takes seconds
    found = list(_written(ast.parse(source), ""))
    writers = {function for function, key in found if "/" in key and declared_key(key)}
    return [
        key
        for function, key in found
        if declared_key(key) is None and (_METRIC.fullmatch(key) or (function and function in writers))
    ]


def _written(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    """All texts in ``node`` that are written as keys of a dict, with the name of the function around them."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Dict(keys=keys):
                pass
            case ast.DictComp(key=key) | ast.Subscript(slice=key, ctx=ast.Store()):
                keys = [key]
            case _:
                keys = []
        for key in keys:
            match key:
                case ast.Constant(value=str(text)):
                    yield function, text
                case ast.JoinedStr(values=parts):
                    yield function, "".join(str(p.value) if isinstance(p, ast.Constant) else "*" for p in parts)
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _written(child, child.name if is_function else function)
