"""Functions of a package, as a user's program passes them."""

from typing import Any


def right(completions: list[str], gt_answer: list[str], **kwargs: Any) -> list[float]:
    return [float(known in text) for text, known in zip(completions, gt_answer, strict=True)]


def brief(item: Any) -> float:
    return 1.0 - item.num_tokens / item.max_new_tokens
