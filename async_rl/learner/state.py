"""What the trainer must remember across a restart, as plain data for the checkpoint.

Everything else of a run (weights, optimizer, random state) is the engine's; the queue's part is an opaque snapshot
that only the queue reads.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from async_rl.learner.staleness_control import BoundState

NO_LINEAGE = ""


def new_lineage() -> str:
    """A name that no other learner start has."""
    return uuid.uuid4().hex[:12]


@dataclass(slots=True)
class TrainerState:
    """``step`` and ``version`` count what is done: the next step trains with weights of ``version``.

    ``digests`` maps versions that may still be in flight to the digests they were published with: one, or two where
    a restart laid the same weights out anew (``experimental.bucket_bytes``). ``pending_evals`` are (dataset, step) that
    were asked for and not yet written. ``skipped_in_a_row`` counts optimizer steps since the last that was not skipped
    (``step_guard.py``); ``bound_state`` is where an adaptive bound stands (``staleness_control.py``). ``elapsed_s`` is
    the run's time up to here.
    """

    step: int = 0
    version: int = 0
    lineage: str = NO_LINEAGE
    parent_lineage: str = NO_LINEAGE
    fork_version: int = 0
    elapsed_s: float = 0.0
    digests: dict[int, tuple[str, ...]] = field(default_factory=dict)
    pending_evals: list[tuple[str, int]] = field(default_factory=list)
    skipped_in_a_row: int = 0
    bound_state: BoundState | None = None
    exhausted: bool = False

    @property
    def is_resumed(self) -> bool:
        """Whether this start goes on from a checkpoint."""
        return self.parent_lineage != NO_LINEAGE

    def add_digest(self, version: int, digest: str) -> None:
        """Note what ``version`` is published with."""
        known = self.digests.get(version, ())
        self.digests[version] = known if digest in known else (*known, digest)

    def fork(self) -> TrainerState:
        """The state of a new learner start that goes on from here, under a lineage of its own."""
        return replace(
            self, lineage=new_lineage(), parent_lineage=self.lineage, fork_version=self.version,
            digests=dict(self.digests), pending_evals=list(self.pending_evals),
        )  # fmt: skip

    def to_plain(self) -> dict[str, Any]:
        plain = asdict(self)
        plain["digests"] = {str(version): list(digests) for version, digests in self.digests.items()}
        plain["pending_evals"] = [list(item) for item in self.pending_evals]
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in plain.items() if key in known}
        values["digests"] = {int(version): tuple(digests) for version, digests in plain["digests"].items()}
        values["pending_evals"] = [(str(name), int(step)) for name, step in plain["pending_evals"]]
        if values.get("bound_state") is not None:
            values["bound_state"] = BoundState(**values["bound_state"])
        return cls(**values)
