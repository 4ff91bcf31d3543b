"""Named points in the code at which a test can stop a process, for example to kill the process at that moment.

The test sets the environment variable ``ASYNC_RL_FAULTS`` to a directory, and creates a file there with the name of a
point. The first process that reaches this point renames the file to NAME.PID and stops itself with SIGSTOP. The test
then kills this process or lets it go on with SIGCONT. If the variable is unset, the points do nothing.
"""

from __future__ import annotations

import os
import signal

FAULT_POINTS = (
    "queue.journaled",  # the turn's changes are committed, its replies are not sent
    "learner.taken",  # the batch has arrived, it is not trained
    "learner.trained",  # the optimizer has stepped, the queue does not know
    "learner.acknowledged",  # the queue has recorded the step (and the snapshot), the checkpoint is not begun
    "learner.checkpoint_saved",  # the checkpoint's files are written under their temporary name
    "learner.checkpoint_written",  # the checkpoint's files are written, `latest` names the one before
    "learner.publishing",  # the version is staged, not announced
    "generator.sampled",  # a group is graded, not returned
    "generator.receiving",  # a bucket of a version has arrived, the version is not verified
    "generator.activating",  # new weights are verified, not active
)

_directory = os.environ.get("ASYNC_RL_FAULTS")


def fault_point(name: str) -> None:
    """Stop this process with SIGSTOP if a test has created the file ``name`` in the directory ``ASYNC_RL_FAULTS``."""
    if _directory is None:
        return
    armed = os.path.join(_directory, name)
    try:
        os.rename(armed, f"{armed}.{os.getpid()}")
    except FileNotFoundError:
        return
    signal.raise_signal(signal.SIGSTOP)
