r"""Reads an answer in LaTeX to its last token: lists, sets, relations, units; expressions by ``expressions``.

``read`` either accounts for every token of the answer or raises ``UnreadableError``. Nothing is skipped but spaces,
sizes of brackets and dollar signs around mathematics.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from latex_answers.bars import with_bars
from latex_answers.finding import UnreadableError
from latex_answers.position import RELATIONS
from latex_answers.quantities import QuantityReader, Term
from latex_answers.tokens import tokens_of
from latex_answers.units import LEADS, changes_number
from latex_answers.values import (
    DEGREE,
    Expression,
    Group,
    NamedSet,
    Quantity,
    Ratio,
    Relation,
    SetOperation,
    Value,
    is_expression,
    is_matrix,
)

_CLOSING = {"(": (")", "]"), "[": ("]", ")"), "\\{": ("\\}",), "{": ("}",)}
_ROUND = {"(": ")", "[": "]", "\\{": "\\}", "{": "}"}


@dataclass(frozen=True, slots=True)
class Reading:
    """What an answer says."""

    value: Value
    num_digits: int | None
    """The digits of its shortest decimal of at least ``LONG_DECIMAL`` significant digits. None without one."""


LONG_DECIMAL = 12
"""Significant digits of a decimal that is taken for the output of a calculator, and so for a rounded number."""


def read(text: str) -> Reading:
    """Return what ``text`` says. It is in the notation of ``notation.in_latex`` and ``arguments.spelled_out``.

    Raises:
        UnreadableError: no reading accounts for all of it.
    """
    tokens = tokens_of(text)
    long = [len(token.text.replace(".", "").lstrip("0")) for token in tokens if "." in token.text.rstrip(".")]
    long = [length for length in long if length >= LONG_DECIMAL]
    errors: list[UnreadableError] = []
    for candidate in with_bars(tokens):
        reader = AnswerReader(candidate)
        try:
            value = reader.answer()
        except UnreadableError as error:
            errors.append(error)
        else:
            return Reading(value, min(long, default=None))
    raise errors[0]


class AnswerReader(QuantityReader):
    """Reads lists of relations of sets of sums."""

    def answer(self) -> Value:
        """Read everything.

        Raises:
            UnreadableError: something is left.
        """
        while self._takes_lead():
            pass
        value = self._list()
        if self.next.kind != "end":
            raise UnreadableError(f"nothing may follow before {self.next.text!r}")
        return value

    def _takes_lead(self) -> bool:
        """Read what may stand before a whole answer and says nothing of it: ``\\approx``, ``\\text{Answer:}``."""
        if self.next.kind == "text" and self.peek(1).kind != "end":
            words = self.next.text.casefold().strip(" :.,").split()
            is_name = words[:1] == ["the"] and words[-1] in ("is", "are") and not any(map(changes_number, words[:-1]))
            return (is_name or " ".join(words) in LEADS) and bool(self.take())
        return self.accept("\\approx", "=", "\\therefore", "\\Rightarrow", "\\implies", ":") is not None

    def _list(self) -> Value:
        items, word = self._items()
        return items[0] if len(items) == 1 else Group("", "", tuple(items), word)

    def _items(self) -> tuple[list[Value], str]:
        """Read values between commas, semicolons and words. With semicolons and others, the former separate tuples.

        Returns:
            The values, and the word between them: ``and``, ``or`` or empty.
        """
        parts: list[list[Value]] = [[]]
        words: set[str] = set()
        while True:
            parts[-1] += self._element()
            separator = self.accept(",", ";", "and", "or")
            if separator is None:
                break
            word = self.accept("and", "or") if separator.text == "," else separator  # ", and"
            if word is not None and word.text != ";":
                words.add(word.text)
            if separator.text == ";":
                parts.append([])
        if len(words) > 1:
            raise UnreadableError("both and and or")
        word = words.pop() if words else ""
        if len(parts) == 1 or all(len(part) == 1 for part in parts):
            return [item for part in parts for item in part], word
        return [part[0] if len(part) == 1 else Group("(", ")", tuple(part)) for part in parts], word

    def _element(self) -> list[Value]:
        """Read one value, or two if it has a ``\\pm``."""
        start, outer = self.index, (self.sign, self.has_sign)
        values: list[Value] = []
        for sign in (1, -1):
            self.index, self.sign, self.has_sign = start, sign, False
            values.append(self._relation())
            if not self.has_sign:
                break
        self.sign, self.has_sign = outer
        return values

    def _relation(self) -> Value:
        sides, operators, modulus = [self._set_value()], [], None
        while (operator := self.accept(*RELATIONS)) is not None:
            operators.append(operator.text)
            sides.append(self._set_value(in_modulo="\\equiv" in operators))
        if self.next.text in ("\\pmod", "\\mod") or (self.next.text == "(" and self.peek(1).text == "\\mod"):
            modulus = self._modulus()
        if not operators and modulus is None:
            return sides[0]
        return Relation(tuple(sides), tuple(operators), modulus)

    def _modulus(self) -> Expression:
        bracket = self.accept("(")
        command = self.take()
        value = self.argument() if self.next.text == "{" or command.text == "\\pmod" else self.sum()
        if bracket is not None:
            self.expect(")")
        if not is_expression(value) or is_matrix(value):
            raise UnreadableError("a modulus that is no number")
        return value

    def _set_value(self, *, in_modulo: bool = False) -> Value:
        value = self._ratio(in_modulo)
        while (operator := self.accept("\\cup", "\\cap", "\\setminus")) is not None:
            value = SetOperation(operator.text, value, self._ratio(in_modulo))
        return value

    def _ratio(self, in_modulo: bool) -> Value:
        parts = [self.quantity(in_modulo)]
        while self.accept(":"):
            parts.append(self.quantity(in_modulo))
        if len(parts) == 1:
            return parts[0]
        if not all(is_expression(part) and not is_matrix(part) for part in parts):
            raise UnreadableError("a ratio of something that is no number")
        return Ratio(tuple(parts))

    # Brackets.

    def group(self, opening: str) -> Value:
        """Read what follows ``opening``. One value in brackets that match is the value itself."""
        outer, self.term = self.term, Term()
        choose = self._choose() if opening == "{" else None
        if choose is not None:
            self.term = outer
            return choose
        items, word = self._items()
        closing = self.accept(*_CLOSING[opening])
        self.term = outer
        if closing is None:
            raise UnreadableError(f"{opening} is not closed before {self.next.text!r}")
        if opening == "\\{":
            items[0] = _condition(items[0])
        if len(items) == 1:
            if closing.text != _ROUND[opening]:
                raise UnreadableError("a single value in brackets that do not match")
            if isinstance(items[0], Quantity) and items[0].unit == "degree":
                return items[0].number * DEGREE
            return Group(opening, "\\}", tuple(items)) if isinstance(items[0], NamedSet) else items[0]
        if (opening, closing.text) == ("[", "]") and len(items) > 2:  # no interval: a list as in a program
            return Group("(", ")", tuple(items), word)
        bounds = ("", "") if opening == "{" else (opening, closing.text)
        return Group(*bounds, tuple(items), word)

    def _choose(self) -> Expression | None:
        """Read ``n \\choose k}`` or ``a \\over b}`` after a brace, or return None for anything else."""
        depth = 0
        for token in self.tokens[self.index :]:
            depth += {"{": 1, "}": -1}.get(token.text, 0)
            if depth < 0:
                return None
            if not depth and token.text in ("\\choose", "\\over"):
                break
        else:
            return None
        top = self.sum()
        operator = self.take()
        bottom = self.sum()
        self.expect("}")
        if operator.text == "\\choose":
            return self.combine(sympy.binomial, top, bottom)
        if bottom == 0 or operator.text != "\\over":
            raise UnreadableError("no fraction")
        return self.combine(lambda one, two: one / two, top, bottom)


def _condition(value: Value) -> Value:
    """Return the inequality of ``x \\mid x>2`` in the braces of a set of real numbers. Any other value stays."""
    if not isinstance(value, Relation) or value.modulus is not None:
        return value
    head = value.operators.index("\\mid") if "\\mid" in value.operators[:2] else None
    if head is None or (head == 1 and (value.operators[0] != "\\in" or value.sides[1] != NamedSet("R"))):
        return value
    condition = Relation(value.sides[head + 1 :], value.operators[head + 1 :])
    is_about = any(is_expression(side) and side.has(value.sides[0]) for side in condition.sides)
    return condition if condition.operators and is_about else value
