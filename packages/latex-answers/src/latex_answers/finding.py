"""What a comparison of two answers finds, and the error of an answer that can't be read."""

from typing import Literal

Finding = Literal["equal", "different", "unreadable", "not_computed"]
"""``unreadable``: one of both has a part that the reader does not know, and they are not typeset alike, so nobody knows
whether they are the same. ``not_computed``: both could be read, but sympy could not compare them."""


class UnreadableError(Exception):
    """The answer has a part that this reader does not know, so it can't be compared as mathematics."""
