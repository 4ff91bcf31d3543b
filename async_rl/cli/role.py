"""What a long-running subcommand does first and last: signals, the parent's death, logging, a broken pipe."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator

from async_rl.process.child import exit_on_sigterm, watch_parent
from async_rl.process.descriptors import few_descriptors
from async_rl.terminal import log_visibly

_WITH_TIME = "%(asctime)s %(levelname)s %(name)s: %(message)s"
PLAIN = "%(message)s"
"""The form of messages for a person who waits."""


@contextlib.contextmanager
def role(log_form: str = _WITH_TIME) -> Iterator[bool]:
    """Prepare this process for a long-running subcommand, such as ``learner``, which runs in the ``with`` block.

    The process ends when its parent dies, runs its ``finally`` blocks on SIGTERM, and logs to standard error, each
    message in the form ``log_form``. Yield whether ``launch`` started this process.
    """
    exit_on_sigterm()
    is_launched = watch_parent()
    log_visibly(logging.INFO, log_form)
    if few := few_descriptors():
        logging.getLogger(__name__).warning("%s", few)
    try:
        yield is_launched
    except BrokenPipeError:
        # Typer would exit without a message, as is right for `| head`. In a long-running process it is a failure.
        traceback.print_exc()
        raise SystemExit(1) from None
