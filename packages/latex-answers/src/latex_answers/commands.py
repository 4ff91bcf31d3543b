r"""Reads commands in LaTeX: fractions, roots, matrices, sums and limits, functions with a name.

Sums, products, integrals, limits and derivatives are not computed. They are undefined functions of their parts, so two
of them are the same if all their parts are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import sympy

from latex_answers.finding import UnreadableError
from latex_answers.position import NO_ATOMS, RELATIONS, Position, undefined
from latex_answers.tokens import FUNCTIONS, Token
from latex_answers.values import DEGREE, Expression, Group, Value, is_expression, is_matrix

_ACCENTS = frozenset({
    "\\vec", "\\hat", "\\widehat", "\\tilde", "\\widetilde", "\\bar", "\\overline", "\\dot", "\\ddot", "\\underline",
    "\\overrightarrow", "\\overleftarrow", "\\overleftrightarrow", "\\mathring", "\\check", "\\breve", "\\acute",
})  # fmt: skip
_ALPHABETS = frozenset({"\\mathbb", "\\mathcal", "\\mathfrak", "\\mathscr", "\\mathtt"})
_NAMED_POINTS = frozenset({"\\angle", "\\triangle", "\\measuredangle", "\\sphericalangle", "\\odot", "\\square"})
_BIG = frozenset({
    "\\sum", "\\prod", "\\int", "\\iint", "\\oint", "\\lim", "\\limsup", "\\liminf", "\\bigcup", "\\bigcap", "\\sup",
    "\\inf", "\\iiint",
})  # fmt: skip
_SYMBOLS = frozenset({
    "\\alpha", "\\beta", "\\gamma", "\\delta", "\\epsilon", "\\zeta", "\\eta", "\\theta", "\\vartheta", "\\iota",
    "\\kappa", "\\lambda", "\\mu", "\\nu", "\\xi", "\\pi", "\\varpi", "\\rho", "\\varrho", "\\sigma",
    "\\varsigma", "\\tau", "\\upsilon", "\\phi", "\\chi", "\\psi", "\\omega", "\\Gamma", "\\Delta", "\\Theta",
    "\\Lambda", "\\Xi", "\\Pi", "\\Sigma", "\\Upsilon", "\\Phi", "\\Psi", "\\Omega", "\\infty", "\\ell", "\\hbar",
    "\\partial", "\\nabla", "\\aleph", "\\Re", "\\Im", "\\Pr", "\\ker", "\\jmath", "\\wp", "\\dots", "\\top",
    "\\bot", "\\checkmark",
})  # fmt: skip
"""Commands that print a name. Any other command may change what stands next to it, so it is a name only alone."""
_PAIRS = {"\\lfloor": ("\\rfloor", sympy.floor), "\\lceil": ("\\rceil", sympy.ceiling)}
_SYMPY_NAMES = {
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot", "arcsec": "asec", "arccsc": "acsc",
    "arsinh": "asinh", "arcosh": "acosh", "artanh": "atanh", "arcsinh": "asinh", "arccosh": "acosh",
    "arctanh": "atanh", "ln": "log", "ceil": "ceiling", "abs": "Abs", "sgn": "sign", "arg": "arg",
}  # fmt: skip
_INVERTIBLE = frozenset({"sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh"})
_MATRICES = frozenset({"matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array", "vmatrix"})


class CommandReader(Position):
    """The rules of commands."""

    def command(self, command: str) -> Value:
        name = command[1:]
        if name in FUNCTIONS:
            return self._function(name)
        if command in _PAIRS:
            closing, function = _PAIRS[command]
            inside = self.sum()
            self.expect(closing)
            return self.combine(lambda one, two: function(one), inside, sympy.Integer(1))
        readers: dict[str, Callable[[], Value]] = {
            "\\frac": self._frac, "\\sqrt": self._root, "\\binom": self._binom, "\\begin": self._environment,
            "\\boxed": self.argument, "\\fbox": self.argument, "\\mathop": self.argument,
        }  # fmt: skip
        if command in readers:
            return readers[command]()
        if command in _BIG:
            return self._big(command)
        if command in _ACCENTS:
            letters = self._letters_in_braces()
            if letters:
                return sympy.Symbol(f"{command} {''.join(letters)}" + self.primes() + self.subscript())
            argument = self.argument()
            if not is_expression(argument) or is_matrix(argument):
                raise UnreadableError("an accent on something that is no number")
            return undefined(command, argument)
        if command in _ALPHABETS:
            return self.applied(command + self._braced_name(), is_argument=False, is_function=False)
        if command in _NAMED_POINTS:
            points = "".join(self._letters_in_braces())
            while self.next.kind in ("letter", "run"):
                points += self.take().text
            return sympy.Symbol(f"{command} {points}" + self.primes() + self.subscript())
        is_name = command in _SYMBOLS or (command not in NO_ATOMS and name.isalpha() and self._was_alone())
        if not is_name or self.next.text == "{":
            raise UnreadableError(f"unknown command {command}")
        marks = self.subscript() + self.primes()
        constants = {"\\pi": sympy.pi, "\\infty": sympy.oo}
        if not marks and command in constants:
            return constants[command]
        return self.applied(command + marks, is_argument=False, is_function="'" in marks)

    def _was_alone(self) -> bool:
        """Whether the token that was just read is a whole side of a relation or item of a list."""
        before = self.tokens[self.index - 2].text if self.index > 1 else ""
        return before in RELATIONS | {"", ",", ";", "(", "\\{"} and self.at_end_of_term()

    def _letters_in_braces(self) -> list[str]:
        """Read several letters in braces, whose order counts: the vector AB is not BA. Anything else is left."""
        if self.next.text != "{" or self.peek(2).text != "}" or self.peek(1).kind != "run":
            return []
        self.index += 3
        return list(self.tokens[self.index - 2].text)

    def _braced_name(self) -> str:
        self.expect("{")
        name = self.take().text
        self.expect("}")
        return name + self.subscript()

    def _frac(self) -> Expression:
        derivative = self._derivative()
        if derivative is not None:
            return derivative
        top, bottom = self.argument(), self.argument()
        if bottom == 0:
            raise UnreadableError("a division by zero")
        if is_matrix(bottom):
            raise UnreadableError("a division by a matrix")
        return self.combine(lambda one, two: one / two, top, bottom)

    def _derivative(self) -> Expression | None:
        r"""Read ``{dy}{dx}`` after ``\frac`` as an undefined function, or return None for any other fraction."""
        start, sides = self.index, []
        for _ in range(2):
            if not self.accept("{"):
                self.index = start
                return None
            inner: list[Token] = []
            while self.next.kind != "end" and self.next.text != "}":
                if self.accept("{"):
                    while self.next.kind != "end" and self.next.text != "}":
                        inner.append(self.take())
                    self.expect("}")
                    continue
                inner.append(self.take())
            self.expect("}")
            sides.append(" ".join(" ".join(token.text) if token.kind == "run" else token.text for token in inner))
        top, bottom = sides
        if re.fullmatch(r"(d|\\partial)( .+)?", top) and re.fullmatch(r"(d|\\partial) .+", bottom):
            return sympy.Symbol(f"derivative {top} / {bottom}")
        self.index = start
        return None

    def _root(self) -> Expression:
        index = sympy.Integer(2)
        if self.accept("["):
            index = self.sum()
            self.expect("]")
        inside = self.argument()
        if not (is_expression(index) and is_expression(inside)) or is_matrix(inside) or is_matrix(index) or index == 0:
            raise UnreadableError("a root of something that is no number")
        if index.is_Integer and index % 2 == 1 and inside.is_negative:
            return -((-inside) ** (1 / index))
        return inside ** (1 / index)

    def _binom(self) -> Expression:
        top, bottom = self.argument(), self.argument()
        return self.combine(sympy.binomial, top, bottom)

    def _environment(self) -> Expression:
        name = self._environment_name()
        if name not in _MATRICES:
            raise UnreadableError(f"unknown environment {name}")
        if name == "array":
            self.expect("{")
            while self.next.kind != "end" and not self.accept("}"):
                self.take()
        rows: list[list[Expression]] = [[]]
        while True:
            if self.next.text != "\\end":  # a line break may stand before the end
                rows[-1].append(self.sum())
            if self.accept("&"):
                continue
            if self.accept("\\\\"):
                rows.append([])
                continue
            self.expect("\\end")
            break
        if self._environment_name() != name:
            raise UnreadableError(f"the environment {name} does not end")
        if not rows[-1]:
            rows.pop()
        if len({len(row) for row in rows}) != 1 or not all(is_expression(one) for row in rows for one in row):
            raise UnreadableError("a matrix with rows of different lengths")
        matrix = sympy.ImmutableMatrix(rows)
        return matrix.det() if name == "vmatrix" and matrix.is_square else matrix

    def _environment_name(self) -> str:
        self.expect("{")
        name = self.take().text
        self.expect("}")
        return name

    def _big(self, command: str) -> Expression:
        """Read a sum, product, integral or limit as an undefined function of its bounds and its body."""
        bounds: dict[str, Expression] = {}
        while (mark := self.accept("_", "^")) is not None:
            if mark.text in bounds:
                raise UnreadableError("two bounds at the same place")
            bounds[mark.text] = self._bound()
        self.in_integral += command.endswith("int")
        body = self.product()
        self.in_integral -= command.endswith("int")
        if not is_expression(body) or is_matrix(body):
            raise UnreadableError(f"{command} of something that is no number")
        names = [sympy.Symbol("none"), sympy.Symbol("none")]
        return undefined(command, *(bounds.get(mark, name) for mark, name in zip("_^", names)), body)

    def _bound(self) -> Expression:
        """Read a bound: an expression, or a relation such as ``k=0``, whose sides become arguments."""
        if not self.accept("{"):
            return self.argument()
        left = self.sum()
        operator = self.accept(*RELATIONS)
        if operator is None:
            self.expect("}")
            return left
        right = self.sum()
        side = ""
        if self.accept("^"):
            found = self.accept("+", "-")
            if found is None:
                self.expect("{")
                found = self.accept("+", "-")
                self.expect("}")
            side = found.text if found else ""
        self.expect("}")
        if not (is_expression(left) and is_expression(right)):
            raise UnreadableError("a bound that is no number")
        return undefined(f"bound {operator.text} {side}", left, right)

    # Functions with a name.

    def _function(self, name: str) -> Value:
        base = self.argument() if name == "log" and self.accept("_") else None
        exponent = None
        if self.next.text == "^":
            self.take()
            exponent = self.argument()
        base = self.argument() if name == "log" and base is None and self.accept("_") else base
        arguments = self._arguments()
        if not all(is_expression(one) for one in arguments):
            raise UnreadableError(f"{name} of something that is no number")
        if exponent == -1 and name in _INVERTIBLE:
            name, exponent = "a" + name, None
        value = self._value_of(name, base, arguments)
        return value if exponent is None else self.combine(lambda one, two: one**two, value, exponent)

    def _arguments(self) -> tuple[Value, ...]:
        if self.next.text in ("(", "[", "{", "\\{", "|(") and self.next.kind == "sign":
            inside = self.atom()
            if isinstance(inside, Group) and (inside.opening, inside.closing) not in (("(", ")"), ("\\{", "\\}")):
                raise UnreadableError("arguments in brackets that do not match")
            return inside.items if isinstance(inside, Group) else (inside,)
        sign = -1 if self.accept("-") else 1
        value = self.power()
        while not self.at_end_of_factor() and not self._is_function(self.next):
            value = self.combine(lambda one, two: one * two, value, self.power())
        return (self.combine(lambda one, two: one * two, sympy.Integer(sign), value),)

    def _is_function(self, token: Token) -> bool:
        return token.kind == "command" and (token.text[1:] in FUNCTIONS or token.text in _BIG)

    def _value_of(self, name: str, base: Value, arguments: tuple[Any, ...]) -> Expression:
        if name in ("gcd", "lcm", "min", "max"):
            return self._of_many(name, arguments)
        if len(arguments) != 1:
            raise UnreadableError(f"{name} of several arguments")
        (argument,) = arguments
        if name == "det" and is_matrix(argument) and argument.is_square:
            return argument.det()
        if is_matrix(argument):
            raise UnreadableError(f"{name} of a matrix")
        if name == "log":
            return self.combine(sympy.log, argument, sympy.Integer(10) if base is None else base)
        if name == "cis":
            return sympy.exp(sympy.I * argument.subs(DEGREE, sympy.pi / 180))
        function = getattr(sympy, _SYMPY_NAMES.get(name, name), None) if name not in ("deg", "dim", "det") else None
        if function is None:
            return undefined("\\" + name, argument)
        return function(argument.subs(DEGREE, sympy.pi / 180))

    def _of_many(self, name: str, arguments: tuple[Any, ...]) -> Expression:
        if name in ("gcd", "lcm") and all(one.is_Integer for one in arguments):
            return sympy.Integer((math.gcd if name == "gcd" else math.lcm)(*(int(one) for one in arguments)))
        if name in ("min", "max") and all(one.is_number and one.is_extended_real for one in arguments):
            return (sympy.Min if name == "min" else sympy.Max)(*arguments)
        return undefined("\\" + name, *sorted(arguments, key=sympy.default_sort_key))
