r"""Wrong answers made out of right ones, by structure: a digit, a sign, a variable, an exponent, a side of a relation.

The mutations work on the text and know nothing of the reader that they test. Some mutants say the same as the answer
(``\frac{0}{7}`` and ``\frac{0}{8}``); these are listed in ``data/equal_mutants.jsonl``, each with a reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"
ANSWERS = [json.loads(line)["gt_answer"] for line in (DATA / "math500_answers.jsonl").read_text("utf-8").splitlines()]

_COMMAND_OR_TEXT = re.compile(r"\\(?:text|mbox|mathrm|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+|\\.")
_OPERATORS = {
    "=": ("\\ne ", "<"), "<": (">", "\\le "), ">": ("<",), "\\le": ("\\ge ", "<"), "\\leq": ("\\geq ", "<"),
    "\\ge": ("\\le ",), "\\equiv": ("\\not\\equiv ",), "\\in": ("\\notin ",), "\\cup": ("\\cap ",),
    "\\pm": ("+", "-"), "\\to": ("=",),
}  # fmt: skip
_FUNCTIONS = {
    "\\cot": "\\tan", "\\sin": "\\cos", "\\cos": "\\sin", "\\ln": "\\log", "\\sqrt": "\\sqrt[3]", "\\pi": "\\theta ",
    "\\infty": "0", "\\frac": "\\binom", "\\gcd": "\\max", "\\lim": "\\sum",
}  # fmt: skip
_UPRIGHT = ("\\mathrm{i}", "\\mathrm{e}", "\\mathrm{d}", "\\mathrm{x}", "\\mathbf{v}", "\\operatorname{i}")


def plain_characters(text: str) -> Iterator[int]:
    """The indices of the characters outside of commands and words."""
    covered = {index for found in _COMMAND_OR_TEXT.finditer(text) for index in range(*found.span())}
    yield from (index for index in range(len(text)) if index not in covered)


def mutants(answer: str) -> Iterator[tuple[str, str]]:
    """(kind, wrong answer), without repetition."""
    known = {answer}
    for kind, mutant in _all_mutants(answer):
        if mutant not in known:
            known.add(mutant)
            yield kind, mutant


def _all_mutants(answer: str) -> Iterator[tuple[str, str]]:
    for index in plain_characters(answer):
        before, character, after = answer[:index], answer[index], answer[index + 1 :]
        if character.isdigit():
            yield "digit", f"{before}{(int(character) + 1) % 10}{after}"
            yield "digit more", f"{before}{character}1{after}"
        elif character in "+-":
            yield "sign", f"{before}{'-' if character == '+' else '+'}{after}"
        elif character.isalpha():
            yield "variable", f"{before}{'y' if character == 'x' else 'x'}{after}"
            yield "prime", f"{before}{character}'{after}"
        elif character in "([" and "," in after:
            yield "bracket", f"{before}{'[' if character == '(' else '('}{after}"
        elif character in ")]" and "," in before:
            yield "bracket", f"{before}{']' if character == ')' else ')'}{after}"
    yield from _of_powers(answer)
    yield from _of_commands(answer)
    yield from _of_lists(answer)
    yield from _of_upright_letters(answer)
    is_number = not re.match(r"\s*(?:[-([]|\\text|\\\{|\\left)", answer)
    yield "sign", "-" + answer if is_number else f"-({answer})"
    yield "term more", answer + "+1"
    yield "factor more", "2" + answer if not re.match(r"[0-9.]", answer) else "2x" + answer


def _of_powers(answer: str) -> Iterator[tuple[str, str]]:
    for found in re.finditer(r"\^\s*(?:\{[^{}]*\}|\\circ|[0-9A-Za-z])", answer):
        if "circ" not in found[0]:
            yield "exponent", answer[: found.start()] + answer[found.end() :]
        yield "exponent", answer[: found.start()] + "^{17}" + answer[found.end() :]
    for found in re.finditer(r"(?<=[0-9a-zA-Z)])(?=[+\-, )]|$)", answer):
        if found.start() in set(plain_characters(answer + "+")) and found.start():
            yield "exponent", f"{answer[: found.start()]}^3{answer[found.start() :]}"


def _of_commands(answer: str) -> Iterator[tuple[str, str]]:
    for found in re.finditer(r"\\[A-Za-z]+|[=<>]", answer):
        before, after = answer[: found.start()], answer[found.end() :]
        for other in _OPERATORS.get(found[0], ()):
            yield "relation", before + other + after
        if found[0] in _FUNCTIONS:
            yield "command", before + _FUNCTIONS[found[0]] + after
        if found[0] in _OPERATORS and found[0] not in ("\\pm", "\\cup", "\\to"):
            yield "side", before + "+2" + found[0] + after
            yield "side", before + found[0] + " 2+" + after


def _of_lists(answer: str) -> Iterator[tuple[str, str]]:
    if "{" in answer or "," not in answer or ",\\!" in answer:
        return
    opening, closing = ("", "") if answer[0] not in "([" or answer[-1] not in ")]" else (answer[0], answer[-1])
    inside = answer[len(opening) : len(answer) - len(closing)]
    items = inside.split(",")
    yield "item less", opening + ",".join(items[1:]) + closing
    yield "item more", opening + inside + ",99" + closing
    if opening and "(" not in inside and "[" not in inside:
        yield "items swapped", opening + ",".join(items[::-1]) + closing


def _of_upright_letters(answer: str) -> Iterator[tuple[str, str]]:
    for letter in _UPRIGHT:
        yield "upright", answer + letter
    for found in re.finditer(r"\\mathrm\{(.)\}", answer):
        for letter in "eidx":
            if letter != found[1]:
                yield "upright", answer[: found.start()] + f"\\mathrm{{{letter}}}" + answer[found.end() :]
        yield "upright", answer[: found.start()] + answer[found.end() :]
