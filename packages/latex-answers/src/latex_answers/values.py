"""What an answer in LaTeX says, as values: expressions of sympy, and the structures around them.

``reading`` makes the values, ``comparison`` compares them. ``Value`` is any of them. An expression is an ``Expr``
or a matrix of sympy. Functions that are not computed (``f(x)``, sums, limits) are undefined functions of sympy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

Expression = Any
"""A sympy Expr or a sympy matrix. sympy's types are too loose for a type checker."""

DEGREE = sympy.Symbol("degree")
"""The sign of a degree within a larger expression."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A constant with a unit: ``5 cm``, ``72%``, ``90^\\circ``."""

    number: Expression
    unit: str
    """In the singular, with its power: ``cm^2``."""
    product: Expression | None = None
    """The same text as a product of variables, if its unit has no upright type: ``5*c*m``."""


@dataclass(frozen=True, slots=True)
class Group:
    """Several values in brackets. ``opening`` and ``closing`` are ``(``, ``[``, ``\\{`` and so on, or empty."""

    opening: str
    closing: str
    items: tuple[Any, ...]
    conjunction: str = ""
    """The word between the items, ``and`` or ``or``. Empty with signs alone."""


@dataclass(frozen=True, slots=True)
class SetOperation:
    """``left`` and ``right`` joined by ``\\cup``, ``\\cap`` or ``\\setminus``."""

    operator: str
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class NamedSet:
    """``\\mathbb{R}`` and its like, or the empty set, whose name is empty."""

    name: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """``a:b`` or ``a:b:c``."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """A chain such as ``0 < x \\le 1``: ``operators`` stand between neighbours of ``sides``.

    With a ``modulus`` the chain holds modulo it. Then there may be a single side.
    """

    sides: tuple[Any, ...]
    operators: tuple[str, ...]
    modulus: Expression | None = None


Value = Any
"""An Expression or one of the classes above."""


def is_expression(value: Value) -> bool:
    return isinstance(value, sympy.Basic | sympy.MatrixBase)


def is_matrix(value: Value) -> bool:
    return isinstance(value, sympy.MatrixBase)


def is_constant(value: Value) -> bool:
    """Whether ``value`` is an expression without variables and undefined functions."""
    if not is_expression(value) or is_matrix(value):
        return False
    return not value.free_symbols and not value.atoms(sympy.core.function.AppliedUndef)
