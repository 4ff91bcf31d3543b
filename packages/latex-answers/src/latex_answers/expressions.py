r"""Reads sums, products, powers and functions in LaTeX: the part of ``reading`` below lists and relations.

What is read has the meaning that its author most likely had: ``x^12`` is the twelfth power, ``\sin 2x`` the sine of
``2x``, ``2\frac{1}{2}`` a mixed number. Text with two usual meanings (``1/xy``) is refused instead.
"""

from __future__ import annotations

import re

import sympy

from latex_answers.commands import CommandReader
from latex_answers.finding import UnreadableError
from latex_answers.position import END, RELATIONS, undefined
from latex_answers.tokens import Token
from latex_answers.values import DEGREE, Expression, Group, Value, is_constant, is_expression, is_matrix

_IN_STATEMENTS = RELATIONS | {"\\cup", "\\cap", "\\setminus", "and", "or"}
_FUNCTION_LETTERS = frozenset("fghFGH")


class ExpressionReader(CommandReader):
    """The rules of expressions. Those of brackets and units are in the subclass."""

    # Sums and products.

    def sum(self) -> Value:
        value, num_terms = None, 0
        while True:
            sign = 1
            has_operator = False
            while (found := self.accept("+", "-", "\\pm", "\\mp")) is not None:
                has_operator = True
                sign *= self._sign_of(found.text)
            if num_terms and not has_operator:
                return value
            term = self.product()
            num_terms += 1
            if sign < 0:
                term = self.combine(lambda one, two: one * two, sympy.Integer(-1), term)
            value = term if value is None else self._added(value, term)
            self.after_term(num_terms)

    def _added(self, one: Value, two: Value) -> Expression:
        if is_expression(one) and is_expression(two) and any(side.has(sympy.oo, -sympy.oo) for side in (one, two)):
            raise UnreadableError("a sum with infinity")
        return self.combine(lambda left, right: left + right, one, two)

    def after_term(self, num_terms: int) -> None:
        """Called after every term of a sum. The subclass looks for units."""

    def _sign_of(self, operator: str) -> int:
        if operator in ("\\pm", "\\mp"):
            self.has_sign = True
            return self.sign if operator == "\\pm" else -self.sign
        return -1 if operator == "-" else 1

    def product(self) -> Value:
        value = self.implicit()
        while (operator := self.accept("*", "\\times", "\\cdot", "/", "\\div", "\\mod")) is not None:
            sign = -1 if self.accept("-") else 1
            start = self.index
            if operator.text in ("/", "\\div"):
                value = self.combine(lambda one, two: one / two, value, self._denominator(value, start) * sign)
            else:
                right = self.combine(lambda one, two: one * two, self.implicit(), sympy.Integer(sign))
                operation = sympy.Mod if operator.text == "\\mod" else lambda one, two: one * two
                value = self.combine(operation, value, right)
        return value

    def _denominator(self, numerator: Value, start: int) -> Expression:
        """Read what follows a slash. In ``1/2x`` only the 2 is below, and ``a/bc`` is refused: it has two readings."""
        before = self.tokens[start - 2] if start > 1 else END
        bottom = self.power()
        if not is_expression(bottom) or is_matrix(bottom):
            raise UnreadableError("a denominator that is no number")
        if not self.at_end_of_factor() and not (before.kind == "number" and is_constant(bottom)):
            raise UnreadableError("a slash before a product")
        while not self.at_end_of_factor():
            bottom = bottom / self.combine(lambda one, two: one * two, sympy.Integer(1), self.power())
        return bottom

    def implicit(self) -> Value:
        """Read factors that stand side by side."""
        start = self.index
        value = self.power()
        num_factors = 1
        while not self.take_unit(value) and not self.at_end_of_factor():
            if self.next.kind == "number" and self.tokens[self.index - 1].kind == "number":
                raise UnreadableError("two numbers side by side")
            whole = self.tokens[start]
            is_frac = self.next.text == "\\frac" and self.index == start + 1  # the fraction after x_2 is a factor
            factor = self.power()
            num_factors += 1
            if is_frac and whole.text.isdigit() and factor.is_Rational and 0 < factor < 1:
                value = value + factor  # a mixed number
            else:
                value = self.combine(lambda one, two: one * two, value, factor)
        return value

    def take_unit(self, value: Value) -> bool:
        """Read a unit after ``value`` if there is one. The subclass does."""
        return False

    # Powers.

    def power(self) -> Value:
        value = self.atom()
        while True:
            if self.accept("!"):
                value = self._factorial(value)
            elif self.next.text == "%" and self.next.kind == "sign" and not self.percent_is_unit(value):
                self.take()
                value = self.combine(lambda one, two: one / two, value, sympy.Integer(100))
            elif self.next.text == "^" and self.next.kind == "sign":
                value = self._raised(value)
            else:
                return value

    def _factorial(self, value: Value) -> Expression:
        if not self.accept("!"):
            return self.combine(lambda one, two: sympy.factorial(one), value, sympy.Integer(1))
        if self.next.text == "!":
            raise UnreadableError("a factorial of three signs")
        if is_expression(value) and value.is_Integer and value >= -1:
            return sympy.factorial2(value)
        return undefined("double factorial", value)

    def percent_is_unit(self, value: Value) -> bool:
        return False

    def _raised(self, base: Value) -> Expression:
        self.expect("^")
        if self._takes_degree():
            return self.combine(lambda one, two: one * two, base, DEGREE)
        if is_matrix(base) and self._takes_transpose():
            return base.T
        exponent = self.argument()
        if is_matrix(base) and not (is_expression(exponent) and exponent.is_Integer):
            raise UnreadableError("a matrix to a power that is no number")
        return self.combine(lambda one, two: one**two, base, exponent)

    def _takes_degree(self) -> bool:
        if self.accept("\\circ"):
            return True
        if self.next.text == "{" and self.peek(1).text == "\\circ" and self.peek(2).text == "}":
            self.index += 3
            return True
        return False

    def _takes_transpose(self) -> bool:
        for width, offset in ((1, 0), (3, 1)):
            token = self.peek(offset)
            braced = width == 1 or (self.next.text == "{" and self.peek(2).text == "}")
            if braced and (token.text in ("\\top", "\\intercal") or (token.kind == "letter" and token.text == "T")):
                self.index += width
                return True
        return False

    def argument(self) -> Value:
        """Read the argument of ``^``, ``\\frac`` and so on: a group in braces, or one factor without its power."""
        if self.accept("{"):
            value = self.sum()
            self.expect("}")
            return value
        if self.accept("-"):
            return self.combine(lambda one, two: one * two, sympy.Integer(-1), self.atom())
        if self.accept("+"):
            return self.atom()
        self._split_run()
        return self.atom(is_argument=True)

    def _split_run(self) -> None:
        if self.next.kind == "run":
            run = self.next
            letters = [Token("letter", letter, run.spaced and not index) for index, letter in enumerate(run.text)]
            self.tokens[self.index : self.index + 1] = letters

    # Atoms.

    def atom(self, *, is_argument: bool = False) -> Value:
        token = self.next
        if token.kind == "run":
            if self.in_integral and re.fullmatch("d[a-zA-Z]", token.text):
                self.take()
                return sympy.Symbol(token.text)
            self._split_run()
            token = self.next
        self.take()
        if token.kind == "number":
            return self._number(token)
        if token.kind == "letter":
            return self._letter(token, is_argument)
        if token.kind == "text":
            name = token.text if len(token.text) == 1 else "text " + token.text.casefold()
            return self.applied(name + self.subscript(), is_argument, is_function=False)
        if token.kind == "command":
            return self.command(token.text)
        if token.kind == "sign" and token.text in ("(", "[", "\\{", "{"):
            return self.group(token.text)
        if token.kind == "sign" and token.text in ("|(", "||("):
            inside = self.sum()
            while (operator := self.accept("\\cup", "\\cap", "\\setminus")) is not None:  # |A\cup B|
                inside = undefined(operator.text, inside, self.sum())
            self.expect(token.text.replace("(", ")"))
            if token.text == "||(":
                return undefined("norm", inside)
            return self.combine(
                lambda one, two: one.det() if is_matrix(one) else sympy.Abs(one), inside, sympy.Integer(1)
            )
        raise UnreadableError(f"no value begins with {token.text!r}")

    def _number(self, token: Token) -> Expression:
        number = sympy.Rational(token.text.rstrip("."))
        if "." in token.text and self.next.text in ("\\overline", "\\dot", "\\bar"):
            return self._repeating(token.text, number)
        if self.next.text == "_":
            return sympy.Symbol(token.text + self.subscript())
        return number

    def _repeating(self, text: str, number: Expression) -> Expression:
        """Read the digits that repeat: ``0.1\\overline{6}``, or ``0.\\dot{1}4\\dot{2}`` from dot to dot."""
        mark = self.next.text
        digits = self._marked_digits(mark)
        if digits is None:
            return number
        places = len(text.partition(".")[2])
        if mark == "\\dot" and (self.next.kind == "number" or self.next.text == mark):
            between = self.take().text if self.next.kind == "number" else ""
            end = self._marked_digits(mark)
            if end is None:
                raise UnreadableError("a repeating decimal that does not end")
            digits += between + end
        if not digits.isdigit() or self.next.kind == "number" or self.next.text == mark:
            raise UnreadableError("a repeating decimal that goes on")
        return number + sympy.Rational(int(digits), (10 ** len(digits) - 1) * 10**places)

    def _marked_digits(self, mark: str) -> str | None:
        """Read ``\\overline{12}`` or the like and return its digits. None if something else follows."""
        if self.next.text != mark or self.peek(1).text != "{" or self.peek(3).text != "}":
            return None
        if self.peek(2).kind != "number":
            return None
        self.index += 4
        return self.tokens[self.index - 2].text

    def subscript(self) -> str:
        """Read a subscript, if there is one, as text. It is a part of the name."""
        if self.next.text != "_" or self.next.kind != "sign":
            return ""
        self.take()
        if not self.accept("{"):
            return "_" + self.take().text
        depth, parts = 1, []
        while True:
            token = self.take()
            depth += {"{": 1, "}": -1}.get(token.text, 0) if token.kind == "sign" else 0
            if token.kind == "end":
                raise UnreadableError("a subscript that does not end")
            if not depth:
                return "_" + " ".join(parts)
            parts.append(token.text)

    def primes(self) -> str:
        primes = ""
        while True:
            if self.accept("'"):
                primes += "'"
            elif self.next.text == "^" and self.peek(1).text in ("\\prime", "'"):
                self.index += 2
                primes += "'"
            elif self.next.text == "^" and self.peek(1).text == "{" and self.peek(2).text in ("\\prime", "'"):
                self.index += 2
                while self.accept("\\prime", "'"):
                    primes += "'"
                self.expect("}")
            else:
                return primes

    def _letter(self, token: Token, is_argument: bool) -> Expression:
        name = token.text
        if name == "d" and self.in_integral and self.next.kind == "letter":
            return sympy.Symbol("d" + self.take().text)
        marks = self.primes() + self.subscript()
        marks += self.primes()
        if not marks and name in "ei":
            return sympy.E if name == "e" else sympy.I
        return self.applied(name + marks, is_argument, is_function=name in _FUNCTION_LETTERS or "'" in marks)

    def applied(self, name: str, is_argument: bool, *, is_function: bool) -> Expression:
        """Read the arguments of a function, as in ``f(x)`` and ``f^{-1}(x)``, or return the symbol ``name``."""
        if is_argument:
            return sympy.Symbol(name)
        statement = self._statement_ahead()
        if statement:
            self.index += len(statement)
            return sympy.Symbol(" ".join((name, *(token.text for token in statement))))
        if is_function:
            name += self._marks_of_function()
        if self.next.text == "(" and self.next.kind == "sign" and (is_function or self._is_list_ahead()):
            self.take()
            start = self.index
            inside = self.group("(")
            if any(token.text in ("\\pm", "\\mp") for token in self.tokens[start : self.index]):
                raise UnreadableError("a function of two values")
            if isinstance(inside, Group) and inside.closing != ")":
                raise UnreadableError("arguments in brackets that do not match")
            items = inside.items if isinstance(inside, Group) else (inside,)
            if not all(is_expression(item) and not is_matrix(item) for item in items):
                raise UnreadableError("a function of something that is no number")
            return undefined(name, *items)
        return sympy.Symbol(name)

    def _statement_ahead(self) -> list[Token]:
        r"""Return the tokens of what stands in brackets, as in ``P(A\mid B)`` and ``P(X=2)``. Empty for expressions."""
        depth, found = 0, []
        for token in self.tokens[self.index :] if self.next.text in ("(", "[") else ():
            found.append(token)
            depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(token.text, 0)
            if not depth:
                return found if any(one.text in _IN_STATEMENTS for one in found) else []
        return []

    def _marks_of_function(self) -> str:
        """Read ``^{-1}`` or ``^{(2)}`` before arguments: the inverse or a derivative, and no power."""
        ahead = [token.text for token in self.tokens[self.index : self.index + 7]]
        if ahead[:6] == ["^", "{", "-", "1", "}", "("]:
            self.index += 5
            return "^-1"
        if ahead[:3] == ["^", "{", "("] and ahead[4:] == [")", "}", "("]:
            self.index += 6
            return "'" * int(ahead[3]) if re.fullmatch("[1-9]", ahead[3]) else f"^({ahead[3]})"
        return ""

    def _is_list_ahead(self) -> bool:
        depth = 0
        for token in self.tokens[self.index :]:
            depth += {"(": 1, ")": -1}.get(token.text, 0)
            if not depth:
                return False
            if depth == 1 and token.text == ",":
                return True
        return False
