"""Soft punishment of over-long answers: DAPO equation 13 (arXiv:2503.14476). Pure."""

from __future__ import annotations


def overlong_penalty(num_tokens: int, *, max_new_tokens: int, cache_length: int, truncated: bool) -> float:
    """A share of the reward's scale, in [-1, 0].

    With L = ``max_new_tokens`` and C = ``cache_length``: 0 up to L - C tokens; then linear, ``((L - C) - n) / C``; -1
    from L on. An answer cut short of L (a context limit) is as over-long as one cut at L, so it gets -1 too.

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
