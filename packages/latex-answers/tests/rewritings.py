r"""Right answers in other notations: what people and models write instead of the LaTeX of the data set."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

Rewriting = Callable[[str], str]


def _plain_fractions(answer: str) -> str:
    return re.sub(r"(?<![0-9])\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}", r"\1/\2", answer)


def _unicode(answer: str) -> str:
    signs = {
        "\\infty": "\u221e", "\\cup": "\u222a", "\\pi": "\u03c0", "\\pm": "\u00b1", "^\\circ": "\u00b0",
        "\\in ": "\u2208 ", "^2": "\u00b2", "^3": "\u00b3",
    }  # fmt: skip
    for latex, sign in signs.items():
        answer = answer.replace(latex, sign)
    answer = re.sub(r"\\sqrt\{?([0-9]+)\}?", "\u221a\\1", answer)
    return re.sub(r"(?<![\\a-z{(\[,])-", "\u2212", answer)


def _like_a_program(answer: str) -> str:
    if "\\" in answer.replace("\\sqrt", "").replace("\\pi", "").replace("\\infty", "").replace("\\cup", ""):
        return answer
    answer = re.sub(r"\\sqrt\{?([0-9]+)\}?", r"sqrt(\1)", answer).replace("\\pi", "pi").replace("^", "**")
    answer = re.sub(r"([0-9]) ?(?=sqrt|pi|[a-z])", r"\1*", answer)
    return answer.replace("\\infty", "inf")


def _other_order(answer: str) -> str:
    found = re.fullmatch(r"([^-+(\[=,]+) ([+-]) ([^-+=,)\]]+)", answer)
    if found is None:
        return answer
    first, operator, second = found.groups()
    return f"{'-' if operator == '-' else ''}{second}+{first}"


def _with_units(answer: str) -> str:
    if re.fullmatch(r"-?[0-9]+", answer):
        return answer + " dollars"
    return answer


def _upright(answer: str) -> str:
    answer = re.sub(r"(?<![\\a-zA-Z])([0-9]*)i(?![a-zA-Z])", r"\1\\mathrm{i}", answer)
    return answer.replace("\\pi", "\\mathrm{\\pi}")


def _expanded_fraction(answer: str) -> str:
    return re.sub(
        r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}",
        lambda found: f"\\frac{{{3 * int(found[1])}}}{{{3 * int(found[2])}}}",
        answer,
    )


def _degrees(answer: str) -> str:
    return answer.replace("^\\circ", " degrees")


def _braces_everywhere(answer: str) -> str:
    answer = re.sub(r"\^([0-9a-z])", r"^{\1}", answer)
    return re.sub(r"\\sqrt([0-9])", r"\\sqrt{\1}", answer)


REWRITINGS: dict[str, Rewriting] = {
    "in dollars": lambda answer: f"${answer}$",
    "in brackets of LaTeX": lambda answer: f"\\( {answer} \\)",
    "in a display": lambda answer: f"\\[{answer}\\]",
    "bold": lambda answer: f"**{answer}**",
    "with a full stop": lambda answer: answer + ".",
    "large fractions": lambda answer: answer.replace("\\frac", "\\dfrac"),
    "small fractions": lambda answer: answer.replace("\\dfrac", "\\tfrac"),
    "plain fractions": _plain_fractions,
    "expanded fractions": _expanded_fraction,
    "without spaces": lambda answer: answer if "\\" in answer else answer.replace(" ", ""),
    "with spaces": lambda answer: (
        answer
        if "{" in answer or ",\\!" in answer or re.search(r",[0-9]{3}", answer)
        else re.sub(r"([=+,])", r" \1 ", answer)
    ),
    "thin spaces": lambda answer: answer.replace(" ", "\\, ") if "text" not in answer and "&" not in answer else answer,
    "sized brackets": lambda answer: (
        re.sub(r"\)", r"\\right)", re.sub(r"\(", r"\\left(", answer))
        if "\\left" not in answer and "text" not in answer and answer.count("(") == answer.count(")")
        else answer
    ),
    "braces": _braces_everywhere,
    "unicode": _unicode,
    "like a program": _like_a_program,
    "another order": _other_order,
    "upright letters": _upright,
    "units": _with_units,
    "degrees": _degrees,
    "named": lambda answer: answer if re.search(r"=|\\in|text|,|mbox", answer) else f"z = {answer}",
    "times": lambda answer: re.sub(r"([0-9]) ?(?=\\sqrt|\\pi)", r"\1\\cdot ", answer),
    "times one": lambda answer: f"1\\cdot {answer}" if re.fullmatch(r"[0-9]+(\.[0-9]+)?", answer) else answer,
    "decimal": lambda answer: f"{int(answer)}.0" if re.fullmatch(r"-?[0-9]+", answer) else answer,
    "thousands": lambda answer: f"{int(answer):,}" if re.fullmatch(r"[0-9]{4,}", answer) else answer,
    "bold matrices": lambda answer: answer.replace("pmatrix", "bmatrix"),
}


def rewritings(answer: str) -> Iterator[tuple[str, str]]:
    """(what was done, the same answer in other notation), for every rewriting that changes ``answer``."""
    for name, rewrite in REWRITINGS.items():
        other = rewrite(answer)
        if other != answer:
            yield name, other
