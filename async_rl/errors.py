"""Every error that async-rl raises on purpose, as one tree.

The user can correct the cause of a ``UserError`` (a bad config, a missing file, a busy port): commands print it as one
message and exit 2. The other errors stop a role, or become a counted record at a process boundary. Messages say what
was expected, what was found, where, and what to do.
"""


class AsyncRLError(Exception):
    """Root of the tree."""


class UserError(AsyncRLError):
    """The user can correct the cause. Commands print it without a traceback and exit 2."""


class ConfigError(UserError):
    """The config file, or a ``--set``, is wrong; the message names the TOML key."""


class DataError(UserError):
    """A dataset file or row is wrong; the message names file and line."""


class ModelError(UserError):
    """The model, its tokenizer or its chat template is missing or unfit."""


class AddressError(UserError):
    """An address is malformed, busy, unreachable, or refused for being open to the network."""


class KeyFileError(UserError):
    """A key file is missing, malformed, or readable by others."""


class RunError(UserError):
    """The run directory belongs to another config, or holds nothing to continue from."""


class WireError(AsyncRLError):
    """A message on a socket is malformed. It is counted and answered, and its content is not used."""


class QueueError(AsyncRLError):
    """The queue server refused a request, or did not answer in time."""


class StorageError(QueueError):
    """The queue's disk fails. The run stops with the cause."""


class DamagedPayloadError(QueueError):
    """A stored group can't be read back. It is given up, and its prompt is sampled again. ``file`` has the damage."""

    def __init__(self, message: str, file: str) -> None:
        super().__init__(message)
        self.file = file


class DamagedJournalError(QueueError):
    """The records of the queue's journal are damaged. The journal is moved aside."""


class StorageFullError(StorageError):
    """The disk is full, or no file descriptor is left. The queue waits for room and tries again."""


class LineageError(QueueError):
    """A learner of an older lineage sent a request, but a newer learner owns the queue."""


class IdInUseError(QueueError):
    """Another generator has this id, and was alive a short time ago. Its id is free when it is silent for longer."""


class StaleRolloutError(AsyncRLError):
    """A rollout is older than ``queue.max_staleness`` allows."""


class WeightsError(AsyncRLError):
    """Weights did not arrive, or their digest does not match their manifest."""


class EngineError(AsyncRLError):
    """A third-party inference engine died, failed or gave an invalid answer. Its generator ends."""


class CorruptWeightsError(WeightsError):
    """The received bytes differ from those in the manifest."""


class RewardError(AsyncRLError):
    """A reward can't be computed: its verifier does not start, or its row has no answer. A wrong answer is no error."""


class SandboxError(UserError):
    """This machine can't isolate the model's programs, or their verifier can't be used."""


class SandboxFailedError(RewardError):
    """The sandbox or the remote verifier failed to run a program, so the program is not judged."""


class EnvironmentProcessError(AsyncRLError):
    """An environment has no process to run in. Its rollout fails."""


class TrainingError(AsyncRLError):
    """The run can't go on (too many filtered groups, a step that can't be trained); the message is a diagnosis."""


class StoppedError(AsyncRLError):
    """A signal asked the learner to stop, and it has saved its last step. The message says what is saved."""


class ParityError(TrainingError):
    """A generator's engine and the learner give the same tokens different log-probabilities at the same weights."""
