"""A position in the tokens of an answer, and what every rule of reading needs. ``expressions`` builds on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import sympy

from latex_answers.finding import UnreadableError
from latex_answers.tokens import Token
from latex_answers.values import Expression, Value, is_expression, is_matrix

END = Token("end", "")
RELATIONS = frozenset({
    "=", "<", ">", "\\le", "\\ge", "\\ne", "\\approx", "\\equiv", "\\sim", "\\simeq", "\\cong", "\\in", "\\notin",
    "\\ni", "\\subset", "\\subseteq", "\\supset", "\\supseteq", "\\to", "\\mapsto", "\\propto", "\\mid", "\\parallel",
    "\\perp", "\\implies", "\\Rightarrow", "\\iff", "\\Leftrightarrow", "\\doteq", "\\nmid", "\\prec", "\\succ",
    "\\leftarrow", "\\Leftarrow", "\\leftrightarrow", "\\rightleftharpoons", "\\gg", "\\ll",
})  # fmt: skip
NO_ATOMS = RELATIONS | {
    "\\cup", "\\cap", "\\setminus", "\\times", "\\cdot", "\\div", "\\mod", "\\pmod", "\\pm", "\\mp", "\\over",
    "\\choose", "\\end", "\\hline", "\\frac", "\\phantom", "\\color", "\\circ", "\\prime", "\\uparrow", "\\downarrow",
    "\\forall", "\\exists", "\\neg", "\\not", "\\emptyset", "\\ref", "\\tag", "\\label", "\\therefore", "\\because",
}  # fmt: skip
STOPS = frozenset(
    {")", "]", "\\}", "}", "|)", "||)", ",", ";", "and", "or", "&", "\\\\", "\\rfloor", "\\rceil", "\\end"}
)


def undefined(name: str, *arguments: Value) -> Expression:
    """Return a function that is not computed, of ``arguments``.

    Raises:
        UnreadableError: an argument is no expression.
    """
    if not all(is_expression(one) and not is_matrix(one) for one in arguments):
        raise UnreadableError(f"{name} of something that is no number")
    return sympy.Function(name)(*arguments)


class Position(ABC):
    """A position in a list of tokens. Subclasses have the rules that are declared at the end."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.index = 0
        self.sign = 1  # of \pm
        self.has_sign = False  # a \pm was read since it was last set to False
        self.in_integral = 0

    # The position.

    @property
    def next(self) -> Token:
        return self.tokens[self.index] if self.index < len(self.tokens) else END

    def peek(self, ahead: int) -> Token:
        return self.tokens[self.index + ahead] if self.index + ahead < len(self.tokens) else END

    def take(self) -> Token:
        token = self.next
        self.index += 1
        return token

    def accept(self, *texts: str) -> Token | None:
        if self.next.kind in ("sign", "command") and self.next.text in texts:
            return self.take()
        return None

    def expect(self, text: str) -> None:
        if self.accept(text) is None:
            raise UnreadableError(f"expected {text}, got {self.next.text!r}")

    def at_end_of_term(self) -> bool:
        token = self.next
        if token.kind == "end":
            return True
        return token.kind in ("sign", "command") and (token.text in STOPS or token.text in RELATIONS)

    def at_end_of_factor(self) -> bool:
        """Whether no factor follows without an operator between."""
        token = self.next
        if token.kind in ("sign", "command"):
            if token.text in ("(", "[", "\\{", "{", "|(", "||("):
                return False
            if token.kind == "command":
                return token.text in NO_ATOMS - {"\\frac"} or token.text in STOPS
            return True
        return token.kind == "end"

    def combine(self, operation: Callable[[Any, Any], Any], one: Value, two: Value) -> Expression:
        if not (is_expression(one) and is_expression(two)):
            raise UnreadableError("arithmetic with something that is no number")
        if any(side.has(sympy.oo, -sympy.oo) for side in (one, two)) and not any(
            side in (1, -1) for side in (one, two)
        ):
            raise UnreadableError("arithmetic with infinity")
        try:
            return operation(one, two)
        except (
            ArithmeticError,
            NotImplementedError,
            TypeError,
            ValueError,
            sympy.matrices.exceptions.MatrixError,
        ) as error:
            raise UnreadableError(str(error)) from error

    # The rules, by the subclasses.

    @abstractmethod
    def sum(self) -> Value:
        """Read a sum, or one value that is no expression."""

    @abstractmethod
    def product(self) -> Value:
        """Read a product, or one value that is no expression."""

    @abstractmethod
    def power(self) -> Value:
        """Read a factor with its powers, factorials and percent signs."""

    @abstractmethod
    def atom(self, *, is_argument: bool = False) -> Value:
        """Read a number, a name, a command with its arguments, or what is in brackets."""

    @abstractmethod
    def argument(self) -> Value:
        """Read the argument of ``^``, ``\\frac`` and so on."""

    @abstractmethod
    def group(self, opening: str) -> Value:
        """Read what follows the bracket ``opening``, with the bracket that closes it."""

    @abstractmethod
    def subscript(self) -> str:
        """Read a subscript, if there is one, as text. It is a part of the name."""

    @abstractmethod
    def primes(self) -> str:
        """Read the primes after a name, if there are any, as text."""

    @abstractmethod
    def applied(self, name: str, is_argument: bool, *, is_function: bool) -> Expression:
        """Read the arguments of a function, as in ``f(x)`` and ``f^{-1}(x)``, or return the symbol ``name``."""
