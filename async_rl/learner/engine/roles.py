"""What surrounds a training on rank 0 and on other ranks: signals, the self-test, and how all ranks end."""

from __future__ import annotations

import logging
from collections.abc import Callable

from async_rl.errors import StoppedError
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.ranks import Ranks
from async_rl.output import logged
from async_rl.process.stop import StopRequest

logger = logging.getLogger(__name__)


def lead(
    engine: FsdpEngine, ranks: Ranks, grace_s: float, train: Callable[[StopRequest], None], *, hint: str = ""
) -> None:
    """Test the engine and train as rank 0, and let the other ranks end as this one does.

    Args:
        grace_s: seconds in which ``train`` must have ended after a signal.
        train: raises StoppedError if it ends because its argument says so, when all is saved.
        hint: follows the text of that error in the log.

    Raises:
        SystemExit: a signal has stopped the training. The code is 128 + signal.
    """
    cause, exit_code = "", 0
    with StopRequest(grace_s, elsewhere=ranks.stop_signal) as stop:
        try:
            with logged(logger, "testing the engine"):
                engine.self_test()
            train(stop)
        except StoppedError as stopped:
            stop.note_saved()
            logger.info("%s%s", stopped, hint)
            exit_code = 128 + stop.signum
        except BaseException as error:
            cause = f"{type(error).__name__}: {error}"
            raise
        finally:
            engine.close(cause, exit_code=exit_code)
    if exit_code:
        raise SystemExit(exit_code)


def follow(engine: FsdpEngine, ranks: Ranks, grace_s: float) -> None:
    """Do what rank 0 says until it ends, as another rank. A signal that this rank gets is reported to rank 0.

    Raises:
        SystemExit: as ``lead`` on rank 0.
        TrainingError: a rank failed. The message is the first cause.
    """
    with StopRequest(grace_s, on_request=ranks.pass_stop_on):
        exit_code = engine.follow()
    if exit_code:
        raise SystemExit(exit_code)
