"""Search in a small collection of texts: the model asks in ``<search>`` tags, and answers in ``<answer>`` tags.

Rows: ``{"messages": [...], "extra_info": {"answers": ["1843"]}}``. ``environment.extra.collection`` is a JSONL file of
``{"title", "text"}``. As in SearchR1's environment, an answer is right if it equals one of ``answers`` once both are
normalised, and an action without either tag is told what to do. Ranking is BM25 (k1 = 1.2, b = 0.75).
Set ``sampling.stop = ["</search>", "</answer>"]``.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from async_rl.environments.protocol import last_tag

NUM_RESULTS = 2
K1, B = 1.2, 0.75
CORRECTION = "Ask with <search> ... </search>, or answer with <answer> ... </answer>."


def prepare(extra: dict[str, Any]) -> None:
    """Read the collection once, before the processes of rollouts are forked: they share it."""
    if "collection" in extra:
        collection(extra["collection"])


async def reset(extra_info: dict[str, Any]) -> str:
    """The row's prompt, as text, is the first state."""
    return extra_info["prompt_text"]


async def step(state: str, action: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    answer, query = last_tag(action, "answer"), last_tag(action, "search")
    if answer is not None:
        right = normalised(answer) in {normalised(known) for known in extra_info["answers"]}
        return {"reward": float(right), "done": True}
    if query is None:
        return {"next_state": f"{state}{action}\n{CORRECTION}\n", "reward": 0.0}
    found = collection(extra_info["collection"]).best(query)
    told = "\n".join(f"{title}: {text}" for title, text in found) or "Nothing found."
    return {"next_state": f"{state}{action}\n<information>\n{told}\n</information>\n", "reward": 0.0}


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and extra spaces (SQuAD's rule)."""
    bare = "".join(" " if character in string.punctuation else character for character in text.lower())
    return " ".join(word for word in bare.split() if word not in ("a", "an", "the"))


class Collection:
    """Documents with an inverted index."""

    def __init__(self, documents: list[tuple[str, str]]) -> None:
        self._documents = documents
        self._words = [Counter(re.findall(r"\w+", f"{title} {text}".lower())) for title, text in documents]
        self._in_documents = Counter(word for words in self._words for word in words)
        self._mean_length = sum(map(Counter.total, self._words)) / max(1, len(documents))

    def best(self, query: str, count: int = NUM_RESULTS) -> list[tuple[str, str]]:
        """At most ``count`` documents with a word of ``query``, best first; of equals the earlier."""
        asked = set(re.findall(r"\w+", query.lower()))
        scored = [(self._score(index, asked), -index) for index in range(len(self._documents))]
        return [self._documents[-index] for score, index in sorted(scored, reverse=True)[:count] if score > 0]

    def _score(self, index: int, asked: set[str]) -> float:
        words = self._words[index]
        damping = K1 * (1 - B + B * words.total() / self._mean_length)
        score = 0.0
        for word in asked & words.keys():
            rarity = math.log(
                1 + (len(self._words) - self._in_documents[word] + 0.5) / (self._in_documents[word] + 0.5)
            )
            score += rarity * words[word] * (K1 + 1) / (words[word] + damping)
        return score


@cache
def collection(path: str) -> Collection:
    """Read once in each process."""
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return Collection([(row["title"], row["text"]) for row in rows])
