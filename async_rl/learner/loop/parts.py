"""Parts of a step that a run may have or not: a list of them beside the algorithm, each in its own module.

``Trainer`` calls every part at the same places of every step, in the order of the list, and knows none of them by name.
A further part is a class with the methods that it needs, and an entry where ``start.py`` builds the list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from async_rl.learner.data.batch import PreparedBatch
from async_rl.learner.interface import UpdateStats
from async_rl.learner.loop.publishing import Published
from async_rl.learner.loop.step_result import StepResult
from async_rl.queue.messages import Acked, Batch


class StepPart:
    """Does nothing at any place of a step. A part overrides what it needs.

    Attributes:
        timed_as: the name under which ``StepClock`` counts the time of ``score`` and ``train``. Empty: nowhere.
    """

    timed_as = ""

    def begin(self) -> None:
        """Begin the first step now. What was counted before belongs to no step."""

    def while_waiting(self, published: Published) -> AbstractContextManager[None]:
        """Use the wait that the ``with`` block is. ``published`` is the newest version, which the engine holds."""
        return nullcontext()

    def check(self, batch: Batch, prepared: PreparedBatch, *, version: int) -> PreparedBatch:
        """Return the sequences without those that must not be trained on. Nothing is scored yet.

        ``version`` is the learner's before the step.
        """
        return prepared

    def score(self, prepared: PreparedBatch) -> PreparedBatch:
        """Return the batch with what the advantages need."""
        return prepared

    @property
    def freezes_policy(self) -> bool:
        """Whether the present step trains only this part, and not the policy."""
        return False

    def train(self, prepared: PreparedBatch, *, version: int) -> PreparedBatch:
        """Train something other than the policy. Return what the policy is trained on."""
        return prepared

    def trained(self, result: StepResult) -> Mapping[str, float]:
        """Return figures of the step's row, before it is acknowledged. Notes on the training judge these."""
        return {}

    def acknowledged(self, acked: Acked) -> None:
        """Note what the queue says of the step."""

    def record(self, result: StepResult) -> Mapping[str, float]:
        """Return further figures of the step's row, once its version is published."""
        return {}

    @property
    def updates(self) -> Sequence[UpdateStats]:
        """The step's optimizer steps of other models than the policy, which use the devices, too."""
        return ()

    def end(self) -> None:
        """Raise what must stop the run, once the step is recorded."""

    @property
    def has_trained(self) -> bool:
        """Whether it has trained a model, so that a run whose policy never changed has not failed."""
        return False
