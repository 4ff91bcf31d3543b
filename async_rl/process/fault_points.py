"""Named places in the code where a fault test may hold a process, to kill it or another one at the worst moment.

``ASYNC_RL_FAULTS`` names a directory. A file NAME in it arms that place: the first process to pass there claims it, by
renaming the file to NAME.PID, and stops as SIGSTOP does, until the test kills it or sends SIGCONT. Without the variable
a place costs one comparison. The places are listed in ``FAULT_POINTS`` and nowhere else.
"""

from __future__ import annotations

import os
import signal

FAULT_POINTS = (
    "queue.journaled",  # the turn's changes are committed, its replies are not sent
    "learner.taken",  # the batch is here, not trained
    "learner.trained",  # the optimizer has stepped, the queue does not know
    "learner.acknowledged",  # the queue has booked the step (and the snapshot), the checkpoint is not begun
    "learner.checkpoint_written",  # the checkpoint's files are written, `latest` names the one before
    "learner.publishing",  # the version is staged, not announced
    "generator.sampled",  # a group is graded, not returned
    "generator.receiving",  # a bucket of a version is here, the version is not verified
    "generator.activating",  # new weights are verified, not active
)

_directory = os.environ.get("ASYNC_RL_FAULTS")


def fault_point(name: str) -> None:
    """Stop here, if a test asked for it."""
    if _directory is None:
        return
    armed = os.path.join(_directory, name)
    try:
        os.rename(armed, f"{armed}.{os.getpid()}")
    except FileNotFoundError:
        return
    signal.raise_signal(signal.SIGSTOP)
