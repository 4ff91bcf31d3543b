"""What an over-long answer loses: DAPO's equation 13 (arXiv:2503.14476), and a harsher variant of it. Pure.

``reward.overlong`` chooses between them; called by ``combine.py``. L = ``max_new_tokens``, C = ``cache_length``.
"""

from __future__ import annotations


def dapo_penalty(num_tokens: int, *, max_new_tokens: int, cache_length: int, truncated: bool) -> float:
    """DAPO's, as a share of the reward's scale, in [-1, 0].

    0 up to L - C tokens; then linear, ``((L - C) - n) / C``; -1 from L on. An answer cut short of L (a context limit)
    is as over-long as one cut at L, so it gets -1 too.

    Args:
        num_tokens: n, sampled tokens.
        max_new_tokens: L, at least 1.
        cache_length: C, at least 1.
        truncated: the answer was cut.

    Raises:
        ValueError: L or C is below 1, or n below 0.
    """
    if max_new_tokens < 1 or cache_length < 1 or num_tokens < 0:
        raise ValueError(
            f"expected max_new_tokens >= 1, cache_length >= 1 and num_tokens >= 0, got {max_new_tokens}, "
            f"{cache_length} and {num_tokens}"
        )
    if truncated or num_tokens >= max_new_tokens:
        return -1.0
    free_length = max_new_tokens - cache_length
    return min(0.0, (free_length - num_tokens) / cache_length)


def zero_at_limit_penalty(
    num_tokens: int,
    *,
    max_new_tokens: int,
    cache_length: int | None,
    truncated: bool,
    earned: float,
    has_answer: bool,
) -> float:
    """Colossal-RL's: the same line, but the whole reward is *0* from L on, instead of less by the scale.

    So between L - C and L a wrong answer gets less than one that was never finished, and only answers that hold one
    (right or wrong) are punished there.

    Args:
        cache_length: None leaves the line out; the reward is still 0 from L on.
        earned: the reward without this, as a share of the scale.
        has_answer: an answer was found in the text.

    Returns:
        A share of the scale: ``-earned`` from L on (and where it was cut), else in (-1, 0].
    """
    if truncated or num_tokens >= max_new_tokens:
        return 0.0 - earned  # not -0.0
    if cache_length is None or not has_answer:
        return 0.0
    return dapo_penalty(num_tokens, max_new_tokens=max_new_tokens, cache_length=cache_length, truncated=False)
