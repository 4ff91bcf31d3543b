"""The exception classes of async-rl. All derive from ``AsyncRLError``.

The user can correct the cause of a ``UserError`` (a bad config, a missing file, a busy port). A command prints the
message of a ``UserError`` and exits with code 2. After any other error, a process stops, or it counts the error and
goes on. Each message says what was expected, what was found, where, and what to do.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class AsyncRLError(Exception):
    """Base class of all errors that async-rl raises on purpose."""


class UserError(AsyncRLError):
    """An error whose cause the user can correct. Commands print its message and exit with code 2."""


class ConfigError(UserError):
    """The config file or a ``--set`` option is wrong. The message names the TOML key."""


class DataError(UserError):
    """A dataset file or one of its rows is wrong. The message names the file and the line."""


class ModelError(UserError):
    """The model, its tokenizer or its chat template is missing or can't be used."""


class AddressError(UserError):
    """A network address is malformed, busy or unreachable, or is open to the network without keys."""


class KeyFileError(UserError):
    """A key file is missing, malformed, or readable by others."""


class RunError(UserError):
    """The run directory can't be used: it belongs to another config or process, or it has no run to resume."""


class ExtensionError(UserError):
    """What an extension or an installed package offers by an entry point can't be imported."""


class StoreError(UserError):
    """The object store of ``checkpoint.mirror`` can't be reached, refused a request, or has damaged objects."""


class WireError(AsyncRLError):
    """A message on a socket is malformed. The receiver ignores its content."""


class QueueError(AsyncRLError):
    """The queue server refused a request, or did not answer in time."""


class StorageError(QueueError):
    """The queue server can't read or write its files on disk. The run stops, and reports this error as the cause."""


class DamagedPayloadError(QueueError):
    """The stored bytes of a group are damaged, so the queue drops the group and its prompt is sampled again.

    ``file`` is the path of the damaged file.
    """

    def __init__(self, message: str, file: str) -> None:
        super().__init__(message)
        self.file = file


class DamagedJournalError(QueueError):
    """The records in the queue's journal (its log of changes on disk) are damaged. The journal is moved aside."""


class StorageFullError(StorageError):
    """The disk is full, or the process can open no more files. The queue waits for room and tries again."""


class LineageError(QueueError):
    """A learner tried to use its run after a newer learner had taken the run over. The older learner must end."""


class IdInUseError(QueueError):
    """A generator asked for an id that another generator still uses.

    The id becomes free when the queue server has received nothing from the other generator for some time.
    """


class StaleRolloutError(AsyncRLError):
    """A rollout was sampled with an older version of the weights than ``queue.max_staleness`` allows."""


class WeightsError(AsyncRLError):
    """A version of the weights can't be published, received or used."""


class EngineError(AsyncRLError):
    """The inference engine of a generator (vLLM) died, failed or returned an invalid result. The generator ends."""


class CorruptWeightsError(WeightsError):
    """The received bytes of the weights differ from those that the manifest describes."""


class RewardError(AsyncRLError):
    """The reward of an answer can't be computed, for example because the dataset row has no reference answer.

    A wrong answer of the model does not raise this error; it gets a low reward.
    """


class SandboxError(UserError):
    """This machine can't isolate programs that the model writes, or the configured verifier can't be used."""


class SandboxFailedError(RewardError):
    """The sandbox or the remote verifier failed to run a program, so it is unknown whether the program is correct."""


class TrainingError(AsyncRLError):
    """Training can't go on, for example because too many groups were filtered. The message explains the cause."""


class RunFailedError(AsyncRLError):
    """A run that ``async_rl.train`` started has failed. The message has the first cause, and the end of its log."""


class StoppedError(AsyncRLError):
    """Training ended early because the process received SIGTERM or SIGINT. The message says which step is saved."""


class RunStoppedError(UserError, TrainingError):
    """The queue stopped the run for a cause that the user can correct, such as a reward that fails for every answer."""


class CollapseError(UserError, TrainingError):
    """The training has collapsed, and ``run.stop_on_collapse`` is set. The message says which step is saved."""


class OwnCodeError(UserError, TrainingError):
    """The user's own loss or advantages failed, or returned something other than they must, so training stops."""


class ParityError(TrainingError):
    """A generator and the learner compute different log-probabilities for the same tokens and the same weights."""


@contextmanager
def naming(key: str, kind: type[UserError]) -> Iterator[None]:
    """Let the message of an error of this ``kind`` begin with the config key ``key``, in place of ``model.path``."""
    try:
        yield
    except kind as error:
        raise kind(f"{key}: {str(error).removeprefix('model.path: ')}") from error
