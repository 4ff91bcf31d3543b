r"""Reads numbers with a unit: ``5\text{ cm}^2``, ``18 dollars``, ``\$18``, ``72\%``, ``90^\circ``.

A unit follows a constant that stands alone. Elsewhere words are variables, and ``%`` is a hundredth.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from async_rl.rewards.math.expressions import ExpressionReader
from async_rl.rewards.math.tokens import Token, UnreadableError
from async_rl.rewards.math.units import SHORT_UNITS, is_unit, unit_name
from async_rl.rewards.math.values import (
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


@dataclass(slots=True)
class Term:
    """What is known of the sum that is being read."""

    may_have_unit: bool = False
    number: int = 0
    """How many terms were read."""
    unit: str | None = None
    product: Expression | None = None
    """The unit as a product of variables, if it has no upright type."""


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
        self.term = Term(may_have_unit=True)
        value = self._sum_before_modulus(in_modulo)
        if self.term.unit is not None and self.term.number > 1:  # the words behind a sum are a product
            self.index, self.term = start, Term()
            value = self._sum_before_modulus(in_modulo)
        unit, product = self.term.unit, self.term.product
        self.term = outer
        if dollars is not None:
            if not is_constant(value) or unit is not None:
                raise UnreadableError("dollars of no number")
            unit = "dollar"
        if unit is not None:
            return Quantity(value, unit, None if product is None else self.combine(_times, value, product))
        return _degrees(value) if is_expression(value) and not is_matrix(value) else value

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
        end, words, power = self._words_ahead()
        if not words or not self._ends_after(end - self.index):
            return False
        if not is_unit(words):
            raise UnreadableError(f"no unit: {words}")
        runs = all(token.kind in ("run", "letter") for token in self.tokens[self.index : end])
        self.term.unit = unit_name(words, power)
        if runs:
            letters = "".join(token.text for token in self.tokens[self.index : end])
            constants = {"e": sympy.E, "i": sympy.I}
            self.term.product = sympy.prod(constants.get(letter) or sympy.Symbol(letter) for letter in letters)
        self.index = end
        return True

    def _words_ahead(self) -> tuple[int, str, str]:
        """Return the index after the words that follow, the words, and the power of the last. No words: empty."""
        index, words = self.index, []
        while index < len(self.tokens):
            token = self.tokens[index]
            is_word = token.kind == "text" or (
                token.kind == "run" and (token.text in SHORT_UNITS or (len(token.text) > 2 and (token.spaced or words)))
            )
            if is_word:
                words.append(token.text)
            elif token.text == "/" and words and self.peek(index + 1 - self.index).kind in ("text", "run"):
                words.append("/")
            else:
                break
            index += 1
        power = ""
        if words and [token.text for token in self.tokens[index : index + 1]] == ["^"]:
            after = [token.text for token in self.tokens[index + 1 : index + 4]]
            if after[:1] in (["2"], ["3"]):
                power, index = after[0], index + 2
            elif len(after) == 3 and after[0] == "{" and after[1] in ("2", "3") and after[2] == "}":
                power, index = after[1], index + 4
        return index, " ".join(words), power


def _times(one: Expression, two: Expression) -> Expression:
    return one * two


def _degrees(value: Expression) -> Value:
    """Return a constant times the sign of a degree as a quantity, and any other expression as it is."""
    if not value.has(DEGREE):
        return value
    number = value / DEGREE
    return Quantity(number, "degree") if is_constant(number) else value
