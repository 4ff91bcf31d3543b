"""Tells the bars that open an absolute value from those that close one. ``reading`` calls it."""

from __future__ import annotations

import itertools

from latex_answers.finding import UnreadableError
from latex_answers.position import END, RELATIONS
from latex_answers.tokens import Token

_MAX_UNCLEAR_BARS = 6
_OPENS_A_BAR = frozenset({
    "", "(", "[", "{", "\\{", "|(", "||(", "+", "-", "*", "/", "=", "<", ">", ",", ";", "and", "or", "^", "_", "&", ":",
    "\\times", "\\cdot", "\\div", "\\pm", "\\mp", "\\\\", *RELATIONS,
})  # fmt: skip
_CLOSES_A_BAR = frozenset({
    "", ")", "]", "}", "\\}", "+", "-", "*", "/", "=", "<", ">", ",", ";", "and", "or", "^", "_", "&", ":", "!",
    "\\times", "\\cdot", "\\div", "\\pm", "\\mp", "\\\\", *RELATIONS,
})  # fmt: skip


def with_bars(tokens: list[Token]) -> list[list[Token]]:
    """Return the tokens with every ``|`` as an opening ``|(`` or a closing ``|)``, in each way that may be meant.

    Raises:
        UnreadableError: too many ways.
    """
    bars = [index for index, token in enumerate(tokens) if token.kind == "sign" and token.text in ("|", "||")]
    if not bars:
        return [tokens]
    choices: list[str] = []
    for index in bars:
        before = tokens[index - 1] if index else END
        after = tokens[index + 1] if index + 1 < len(tokens) else END
        opens = before.kind in ("sign", "command", "end") and before.text in _OPENS_A_BAR
        closes = after.kind in ("sign", "command", "end") and after.text in _CLOSES_A_BAR
        previous = choices[-1] if choices and bars[len(choices) - 1] == index - 1 else ""
        choices.append("(" if opens or (previous == "(" and not closes) else ")" if closes else "()")
    if sum(len(choice) > 1 for choice in choices) > _MAX_UNCLEAR_BARS:
        raise UnreadableError("too many bars")
    results: list[list[Token]] = []
    for ends in itertools.product(*choices):
        depths = list(itertools.accumulate(1 if end == "(" else -1 for end in ends))
        if min(depths) >= 0 and depths[-1] == 0:
            result = list(tokens)
            for index, end in zip(bars, ends, strict=True):
                result[index] = Token("sign", tokens[index].text + end, tokens[index].spaced)
            results.append(result)
    if not results:
        raise UnreadableError("bars that do not match")
    return results
