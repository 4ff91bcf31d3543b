"""Named points in the code at which a test can stop a process, for example to kill the process at that moment.

The test sets the environment variable ``ASYNC_RL_FAULTS`` to a directory, and creates a file there with the name of a
point. The first process that reaches this point renames the file to NAME.PID and stops itself with SIGSTOP. The test
then kills this process or lets it go on with SIGCONT. If the variable is unset, the points do nothing.

``substitute`` lets a test put an object of its own in the place of another one, in every process that it starts.
"""

from __future__ import annotations

import importlib
import os
import signal
from typing import Any

from async_rl.errors import ConfigError

FAULT_POINTS = (
    "queue.journaled",  # the turn's changes are committed, its replies are not sent
    "learner.taken",  # the batch has arrived, it is not trained
    "learner.forward",  # a micro-batch's loss is computed (rank 0; "learner.forward-rank-1" on rank 1, and so on)
    "learner.backward",  # a micro-batch's gradients are accumulated, the optimizer has not stepped (likewise)
    "learner.trained",  # the optimizer has stepped, the queue does not know
    "learner.acknowledged",  # the queue has recorded the step (and the snapshot), the checkpoint is not begun
    "learner.checkpoint_writing",  # in the background: the engine's files are written, those of rank 0 not all
    "learner.checkpoint_saved",  # the checkpoint's files are written under their temporary name
    "learner.checkpoint_written",  # the checkpoint's files are written, `latest` names the one before
    "learner.publishing",  # the version is staged, not announced
    "generator.sampled",  # a group is graded, not returned
    "generator.receiving",  # a bucket of a version has arrived, the version is not verified
    "generator.activating",  # new weights are verified, not active
)
"""Those of a run of reinforcement learning."""
AGENT_FAULT_POINTS = (
    "generator.session_opened",  # the front takes the calls of a lease's sessions, their agents are not started
    "generator.call_begun",  # the engine has a call, and has sampled nothing for it
    "generator.call_answered",  # an answer is in its session's sequences, the front does not have it
    "generator.reward_reported",  # a session's reward is noted, the one who reported it is not told
    "generator.session_ended",  # an agent has ended and its calls are stopped, its rollout is not judged
    "front.called",  # a call is sent to the generator, it is not answered
    "front.answered",  # the generator's answer is here, nothing of it is sent to the agent
    "front.delivered",  # the agent's connection has the whole answer, the generator does not know
    "agent.begun",  # an agent's process has its rollout, the agent's code is not started
    "agent.ended",  # the agent has returned, the generator does not know
    "fork_server.forked",  # a process for an agent is forked, the generator does not know its id
    "fork_server.killing",  # a process shall be killed with all that it started, none of them is
)
"""Those of a run with agents, in addition. The first word is the process that reaches a point."""
OFFLINE_FAULT_POINTS = (
    "offline.reference_scored",  # a chunk of the reference model's log-probabilities is kept
    "offline.trained",  # the optimizer has stepped, its row of metrics is not written
    "offline.trained_all",  # the last checkpoint is committed, the model is not exported
)
"""Those of training on given rows, in addition to those of the engine and of checkpoints."""

MIRROR_FAULT_POINTS = (
    "mirror.copied",  # an object is copied and compared, the manifest does not list it
)
"""Those of the process that mirrors a run."""

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


def substitute(variable: str) -> Any:
    """Return the object that a test puts in the place of another one. None if the environment has no ``variable``.

    The variable holds ``MODULE:NAME``.

    Raises:
        ConfigError: this is no test, because ``ASYNC_RL_FAULTS`` is not set.
    """
    path = os.environ.get(variable)
    if path is None:
        return None
    if "ASYNC_RL_FAULTS" not in os.environ:
        raise ConfigError(f"{variable} is for async-rl's own tests, got {path!r}; remove it from the environment")
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
