"""What the trainer remembers across a restart, as plain data for the checkpoint.

The engine keeps weights, optimizer and random state. The queue's part is an opaque snapshot that only the queue reads.
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

    Attributes:
        lineage, parent_lineage: names of this learner start and of the one whose checkpoint it resumes.
        fork_version: the version of that checkpoint.
        elapsed_s: the run's time up to here, without the time between learner starts.
        digests: versions that may still be in flight -> the digests they were published with. There are two if a
            restart published the same weights with another ``experimental.bucket_bytes``.
        pending_evals: (dataset, step) of evaluations that were requested and not yet written.
        skipped_in_a_row: optimizer steps since the last one that was not skipped (``step_result.py``).
        bound_state: the state of an adaptive staleness bound (``staleness_control.py``).
        exhausted: the data has ended.
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
        """Whether this start resumes a checkpoint."""
        return self.parent_lineage != NO_LINEAGE

    def add_digest(self, version: int, digest: str) -> None:
        """Remember a digest that ``version`` was published with."""
        known = self.digests.get(version, ())
        self.digests[version] = known if digest in known else (*known, digest)

    def fork(self) -> TrainerState:
        """The state of a new learner start that resumes here, under a new lineage."""
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
