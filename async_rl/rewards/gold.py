r"""Reads the right answer of a row, its gold, as public data sets write it, and returns texts that an answer may equal.

GSM8K's gold is a whole solution that ends with ``#### 72``, MATH's one with ``\boxed{72}``; others are a list with one
answer as text, a letter with its option, the number of an option, ``1.5 million`` or ``The answer is 72.`` A form is
read only where it is unambiguous: ``3,5`` may be two values, so it stays. The rewards of ``answers`` call this module,
the loader of rows to refuse what says nothing, and the checks before a run. The row keeps what its author wrote.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from string import ascii_uppercase
from typing import Any

from async_rl.rewards.extraction import extract_boxed

_NOTHING = frozenset({"proof", "notfound", "nan", "n/a"})
"""What data sets of mathematics write where a problem has no answer (NuminaMath), and pandas for an empty cell."""
_MOST_WORDS = 30
"""Number of words above which a gold that no form fits is prose, with which no boxed answer could agree."""
_MOST_WORDS_SAID = 3
_WORD = re.compile(r"(?<!\\)\b[^\W\d_]{2,}")
_HASHES = re.compile(r"(?:^|\n)[ \t]*####[ \t]*([^\n]+)\Z")
_SAID = re.compile(
    r"(?s:.*)(?:(?:\b(?:the|final|correct|my) answer|(?:\A|\n)[ \t*]*ans(?:wer)?)(?: is\b|(?=[ *]*:))"
    r"|答案(?:[是为]|(?=[:：])))[ *]*+[:：]?[ *]*+(?!not\b|that\b)([^\n]*?[^\n\s.。*])[.。*]*"
    r"(?:\s*I hope it is correct\.?)?\Z",
    re.IGNORECASE,
)
_LETTER = re.compile(
    r"(?:\\text(?:bf)?\s*\{\s*\(([A-J])\)\s*\}(?:\\?\s)*|\(([A-J])\)\s+|([A-J])(?:\)\s*|[.:]\s+))"
    r"(?![A-J]\.?\Z)(-?(?:[\w$]|\\(?:[dt]?frac|sqrt|text|pi|\$)).*)\Z"
)
_OTHER_LETTER = re.compile(r"\b[A-J][).:]\s")
_LARGE = re.compile(
    r"\\?\$?\s*([+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)\s*(?:\\text\{)?\s*(thousand|million|billion|trillion)\b\}?(\D*)",
    re.IGNORECASE,
)
_ZEROS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}


def gold_readings(row: Mapping[str, Any], *, is_mathematics: bool) -> tuple[str, ...]:
    """Return the texts of which an answer must equal one, the final answer that a model would write first.

    Args:
        row: the fields of a row, of which ``gt_answer``, ``choices`` and ``options`` are read.
        is_mathematics: whether answers are compared as mathematics. Else a text is also an answer as it stands.

    Returns:
        Empty if nothing can be read.
    """
    gold = row.get("gt_answer")
    # To get a column that was dropped is an error.
    options = next((row[key] for key in ("choices", "options") if key in row), None)
    if (written := number_text(gold)) is not None:
        return _of_index(gold, written, options)
    if not isinstance(gold, str) or not (text := gold.strip()):
        return ()
    found = _of_text(text, is_mathematics)
    return found if is_mathematics else tuple(dict.fromkeys((*found, text)))


def number_text(value: Any) -> str | None:
    """Return the digits of a number without an exponent, as an answer has them. None if ``value`` is no finite one."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal) or not math.isfinite(value):
        return None
    return str(value) if isinstance(value, int) else format(Decimal(str(value)), "f")


def _of_index(gold: Any, written: str, options: Any) -> tuple[str, ...]:
    """Return the letter of the option that an integer names, the option and the number, which prompts may ask for.

    Return the number alone if there are no options, or if it is another option itself.
    """
    texts = options["text"] if isinstance(options, Mapping) and "text" in options else options
    if not isinstance(gold, int) or not isinstance(texts, list) or not 0 <= gold < len(texts) <= len(ascii_uppercase):
        return (written,)
    shown = [str(one).strip() for one in texts]
    is_value = written in shown and written != shown[gold]
    return (written,) if is_value else (ascii_uppercase[gold], shown[gold], written)


def _of_text(text: str, is_mathematics: bool) -> tuple[str, ...]:
    if text.startswith("[") and (listed := _only_item(text)) is not None:
        return (*gold_readings({"gt_answer": listed}, is_mathematics=is_mathematics), text)
    if found := _HASHES.search(text):
        return (found[1].strip(),)
    said = _SAID.match(text) if is_mathematics else None
    is_whole = said is not None and said[1].count("{") == said[1].count("}")
    if said is not None and is_whole and len(_WORD.findall(said[1])) <= _MOST_WORDS_SAID:
        return _of_text(said[1].strip(), is_mathematics)
    if (boxed := extract_boxed(text).answer) is not None:
        return (boxed,)
    if not is_mathematics:
        return (text,)
    if (found := _LETTER.match(text)) and not _OTHER_LETTER.search(found[4]):
        return found[1] or found[2] or found[3], found[4], text
    if found := _LARGE.fullmatch(text):
        amount = Decimal(found[1].replace(",", "")).scaleb(_ZEROS[found[2].lower()])
        return format(amount.normalize(), "f") + found[3], text
    return () if text.casefold() in _NOTHING or len(_WORD.findall(text)) > _MOST_WORDS else (text,)


def _only_item(text: str) -> Any:
    """Return the item of ``text``, if that is JSON of a list with one text or number. Else None."""
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_one = isinstance(listed, list) and len(listed) == 1 and isinstance(listed[0], str | int | float)
    return listed[0] if is_one else None
