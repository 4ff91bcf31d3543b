"""The task of ``async-rl quickstart --model smollm2``: short instructions whose answers a program can check.

The model must keep to the form that is asked for: a number of words, a first or last word, a word that occurs. A small
instruct model mostly writes on, or writes about the instruction. The held-out rows have other subjects and words.
"""

from __future__ import annotations

import json
import random
import re
from itertools import product
from pathlib import Path
from typing import Any

from async_rl.rewards.records import RewardInput

NUM_TRAIN, NUM_HELD_OUT = 900, 120
NUMBERS = {"three": 3, "four": 4, "five": 5, "six": 6, "seven": 7}
TEXTS = {
    "count": "Write exactly {value} words about {subject}.",
    "list": "List {value} words about {subject}, separated by commas.",
    "contains": "Write one short sentence about {subject} that contains the word {value}.",
    "first": "Write one short sentence about {subject} whose first word is {value}.",
    "last": "Write one short sentence about {subject} whose last word is {value}.",
    "question": "Ask one short question about {subject} that contains the word {value}.",
}
"""Kind of instruction -> its text. ``value`` is one of ``NUMBERS`` for the first two, else one of ``WORDS``."""
SUBJECTS = {
    "train": (
        "the sea", "a cat", "winter", "bread", "the moon", "a train", "music", "a garden", "coffee", "the city",
        "a river", "football", "a storm", "books", "the forest", "a bicycle", "summer", "a horse", "the kitchen",
        "friends", "a mountain", "school", "the rain", "a boat", "cheese", "the sun", "a dog", "dancing", "a bridge",
        "autumn",
    ),
    "held_out": (
        "the desert", "a bird", "spring", "soup", "the stars", "a market", "painting", "a farm", "tea", "the beach",
    ),
}  # fmt: skip
WORDS = {
    "train": ("red", "old", "happy", "cold", "big", "night", "home", "water", "green", "slow", "morning", "small"),
    "held_out": ("blue", "new", "warm", "loud", "evening", "quiet"),
}
_WORD = re.compile(r"[A-Za-z']+")


def is_followed(kind: str, value: str, answer: str) -> bool:
    """Return whether ``answer`` is one line that keeps to the instruction of this kind, a name in ``TEXTS``."""
    answer = answer.strip()
    words = [word.lower() for word in _WORD.findall(answer)]
    if not words or "\n" in answer:
        return False
    if kind == "count":
        return len(words) == NUMBERS[value]
    if kind == "list":
        parts = answer.rstrip(".").split(",")
        return len(parts) == NUMBERS[value] and all(1 <= len(_WORD.findall(part)) <= 2 for part in parts)
    if len(words) < 3:  # no sentence
        return False
    if kind == "question":
        return answer.endswith("?") and answer.count("?") == 1 and value in words
    return value in {"contains": words, "first": words[:1], "last": words[-1:]}[kind]


def score(item: RewardInput) -> float:
    """The reward: 1 if the answer ends by itself and keeps to the instruction of its row, else 0."""
    data = item.reward_data
    return float(item.finish_reason != "length" and is_followed(data["kind"], data["value"], item.text))


def make_rows(part: str, count: int, *, seed: int) -> list[dict[str, Any]]:
    """Return ``count`` different rows of ``train`` or ``held_out``, as many of each kind, in a random order."""
    rng = random.Random(f"{seed} {part}")
    rows: list[dict[str, Any]] = []
    for kind, text in TEXTS.items():
        values = tuple(NUMBERS) if kind in ("count", "list") else WORDS[part]
        chosen = rng.sample(list(product(values, SUBJECTS[part])), count // len(TEXTS))
        for value, subject in chosen:
            message = {"role": "user", "content": text.format(value=value, subject=subject)}
            rows.append({"messages": [message], "kind": kind, "value": value})
    rng.shuffle(rows)
    return rows


def write_rows(directory: Path, *, seed: int) -> None:
    """Write ``train.jsonl`` and ``held_out.jsonl``."""
    directory.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", NUM_TRAIN), ("held_out", NUM_HELD_OUT)):
        lines = (json.dumps(row) + "\n" for row in make_rows(part, count, seed=seed))
        (directory / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
