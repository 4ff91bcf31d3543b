"""Named points in the code at which a test can stop a process, for example to kill the process at that moment.

The test sets the environment variable ``ASYNC_RL_FAULTS`` to a directory, and creates a file there with the name of a
point. The first process that reaches this point renames the file to NAME.PID and stops itself with SIGSTOP. The test
then kills this process or lets it go on with SIGCONT. If the variable is unset, the points do nothing. The first word
of a name is the process that reaches the point.

``substitute`` lets a test put an object of its own in the place of another one, in every process that it starts.
"""

from __future__ import annotations

import importlib
import os
import signal
from typing import Any

from async_rl.errors import ConfigError

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
