"""What a generator that serves weights answers to another one, in addition to ``protocol``. No torch.

A request is that of ``protocol``; its items are buckets. In the answer a status byte precedes every record of up to
``RECORD_BYTES``, because the serving generator may itself wait for its bytes:

- ``WAIT``: it is alive, nothing else.
- ``RECORD``: the next record of the bucket follows.
- ``END``: the bucket is complete, and its bytes had the right digest. The next bucket follows.
- ``RESTART``: they had not. The bucket begins again.
- ``GONE``: it does not have this version any more.

So a generator passes on bytes before it can verify them, and still is alone to blame if it confirms wrong ones.
"""

from __future__ import annotations

WAIT, RECORD, END, RESTART, GONE = b"\0", b"\1", b"\2", b"\3", b"\4"
WAIT_S = 1.0
"""Time between two ``WAIT``."""
SILENT_S = 4.0
"""A peer that has sent nothing for this long, not even ``WAIT``, is given up."""
WINDOW_BYTES = 8 << 20
"""A peer that sends less than this in a window of time is given up, see ``window_s``. It is little, because on a slow
network the learner, from which the rest is pulled then, is no faster."""


def window_s(depth: int) -> float:
    """Return the time in which ``WINDOW_BYTES`` must arrive ``depth`` pulls below the learner.

    It grows with the depth, so that the generator next to a failure is the first to give up: those below it go on.
    """
    return 6.0 + 3.0 * depth
