r"""Reads numbers with a unit: ``5\text{ cm}^2``, ``18 dollars``, ``\$18``, ``72\%``, ``90^\circ``.

A unit follows a constant that stands alone. Elsewhere words are variables, and ``%`` is a hundredth.
"""

from __future__ import annotations

from dataclasses import dataclass

from latex_answers.expressions import ExpressionReader
from latex_answers.finding import UnreadableError
from latex_answers.tokens import Token
from latex_answers.units import SHORT_WORDS, unit_name
from latex_answers.values import (
    DEGREE,
    Expression,
    NamedSet,
    Quantity,
    Value,
    is_constant,
    is_expression,
    is_matrix,
)

_SETS_IN_WORDS = {
    "all real numbers": "R", "all reals": "R", "no solution": "", "no solutions": "", "no real solution": "",
    "no real solutions": "", "the empty set": "", "empty set": "",
}  # fmt: skip


_IN_UNITS = {"\\cdot": "*", "\\times": "*", "\\Omega": "\u03a9", "\\mu": "\u03bc", "\\min": "min", "\\deg": "deg"}


@dataclass(slots=True)
class Term:
    """What is known of the sum that is being read."""

    may_have_unit: bool = False
    number: int = 0
    """How many terms were read."""
    unit: str | None = None
    lead: str = ""
    """The unit before the number."""
    is_upright: bool = True
    """Whether the unit is in upright type. Otherwise it may also be a product of variables."""


class QuantityReader(ExpressionReader):
    """The rules of units, and of the names of sets."""

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__(tokens)
        self.term = Term()

    def quantity(self, in_modulo: bool) -> Value:
        named = self._named_set()
        if named is not None:
            return named
        dollars = self.accept("\\$")
        start, outer = self.index, self.term
        self.term = Term(may_have_unit=True, lead="dollars" if dollars is not None else "")
        value = self._sum_before_modulus(in_modulo)
        if self.term.unit is not None and self.term.number > 1:  # the words behind a sum are a product
            self.index, self.term = start, Term()
            value = self._sum_before_modulus(in_modulo)
        unit, product = self.term.unit, None
        if unit and not self.term.is_upright:
            product = self._product(start, in_modulo)
        self.term = outer
        if dollars is not None:
            if not is_constant(value) or unit == "%":
                raise UnreadableError("dollars of no number")
            unit = unit or "dollar"
        if unit:
            return Quantity(value, unit, product)
        return _degrees(value) if is_expression(value) and not is_matrix(value) else value

    def _product(self, start: int, in_modulo: bool) -> Expression | None:
        """Read a number and its unit again from ``start``, as a product of variables. None if they are none."""
        num_after = len(self.tokens) - self.index
        self.index, self.term = start, Term()
        try:
            value = self._sum_before_modulus(in_modulo)
        except UnreadableError:
            value = None
        end = len(self.tokens) - num_after  # letters that were read one by one are tokens now
        is_whole, self.index = self.index == end, end
        return value if is_whole and is_expression(value) else None

    def _sum_before_modulus(self, in_modulo: bool) -> Value:
        """Read a sum. In a congruence ``\\mod`` is no operator: it ends the sum."""
        if not in_modulo:
            return self.sum()
        ends = [
            index for index in range(self.index, len(self.tokens)) if self.tokens[index].text in ("\\mod", "\\pmod")
        ]
        if not ends:
            return self.sum()
        end = ends[0] - (self.tokens[ends[0] - 1].text == "(")
        after = self.tokens[end:]
        self.tokens = self.tokens[:end]
        value = self.sum()
        if self.next.kind != "end":
            raise UnreadableError(f"{self.next.text} before a modulus")
        self.tokens = self.tokens + after
        return value

    def _named_set(self) -> NamedSet | None:
        if self.accept("\\emptyset"):
            return NamedSet("")
        if self.next.kind == "text" and self.next.text.casefold() in _SETS_IN_WORDS:
            return NamedSet(_SETS_IN_WORDS[self.take().text.casefold()])
        inside = [token.text for token in self.tokens[self.index + 1 : self.index + 4]]
        if self.next.text == "\\mathbb" and len(inside) == 3 and inside[0] == "{" and inside[2] == "}":
            after = self.peek(4).text
            if after in ("^", "_", "(", "["):
                return None
            self.index += 4
            return NamedSet(inside[1])
        if self.next.text == "\\{" and inside[:1] == ["\\}"]:
            self.index += 2
            return NamedSet("")
        return None

    def after_term(self, num_terms: int) -> None:
        self.term.number = num_terms

    def percent_is_unit(self, value: Value) -> bool:
        return self.term.may_have_unit and self._ends_after(1) and is_constant(value)

    def _ends_after(self, width: int) -> bool:
        self.index += width
        is_end = self.at_end_of_term() or self.next.text in (":", "\\cup", "\\cap")
        self.index -= width
        return is_end

    def take_unit(self, value: Value) -> bool:
        """Read the unit of ``value``, if one follows and nothing else does."""
        if not self.term.may_have_unit or not is_constant(value):
            return False
        if self.next.text == "%":
            if not self._ends_after(1):
                return False
            self.take()
            self.term.unit = "%"
            return True
        end, text = self._words_ahead()
        self.term.unit = unit_name(f"{self.term.lead} {text}", is_single=bool(abs(value) <= 1)) if text else None
        if self.term.unit is None:
            return False
        self.term.is_upright = any(token.kind == "text" for token in self.tokens[self.index : end])
        self.index = end
        return True

    def _words_ahead(self) -> tuple[int, str]:
        """Return the index of the end of the term and the text up to there. No text: no words follow."""
        start, after = self.index, self.peek(1)
        is_symbol = self.next.text in ("\\Omega", "\\min", "\\deg") or (
            self.next.text == "\\mu" and after.kind == "text"
        )
        is_compound = self.next.kind == "letter" and self.next.spaced and after.text in ("/", "^", "\\Omega")
        if not (is_symbol or is_compound or _is_word(self.next)):
            return start, ""
        text, depth = "", 0
        while depth or not self._ends_after(0):
            token = self.take()
            depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(token.text, 0)
            is_bare = token.kind in ("letter", "run") and not (is_compound or text.endswith(("/", "*", "(")))
            if token.kind == "end" or (is_bare and not _is_word(token)):
                self.index = start
                return start, ""
            text += " " * token.spaced + _IN_UNITS.get(token.text, token.text)
        end, self.index = self.index, start
        return end, text


def _is_word(token: Token) -> bool:
    is_long = token.kind == "run" and token.spaced and len(token.text) > 2
    return is_long or token.kind == "text" or token.text in SHORT_WORDS


def _degrees(value: Expression) -> Value:
    """Return a constant times the sign of a degree as a quantity, and any other expression as it is."""
    if not value.has(DEGREE):
        return value
    number = value / DEGREE
    return Quantity(number, "degree") if is_constant(number) else value
