"""What a group costs the queue by how many are queued: the real state with its journal, in this process, CPU time.

The journal's index lies on disk like its groups. A step leases, returns, takes and acknowledges one batch, with a
commit after each of them, as the server's turns do; reading the group and the state's work are in, sockets are not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from async_rl.config.loading import parse_config
from async_rl.data.dataset import Row
from async_rl.net.codec import encode_group
from async_rl.queue.core import generator_requests, learner_requests
from async_rl.queue.core.admission import QueueSettings
from async_rl.queue.core.groups import read_summary
from async_rl.queue.core.prompts import PromptStream
from async_rl.queue.core.state import QueueState, encode_state
from async_rl.queue.messages import Announcement, NotReady, StepAck, TrainedCounts
from async_rl.queue.storage.journal import Changes, Journal
from async_rl.records import Sampling
from benchmarks.queue_product import DIGEST, GROUP_SIZE, PROMPT_TOKENS, make_group, rollouts, tokens_for

GROUPS_PER_STEP = 100
_SIZE_BYTES = 2 << 10
_MAX_STALENESS = 1024
_LINEAGE = "0123456789abcdef"
_NUM_ROWS = 4096


@dataclass(slots=True)
class _Queue:
    """A queue with its journal, and a learner and a generator that call it directly."""

    state: QueueState
    changes: Changes
    journal: Journal
    version: int = 0

    def commit(self) -> None:
        self.journal.commit(self.changes.drain(), {"queue": encode_state(self.state)})

    def announce(self) -> None:
        learner_requests.announce(self.state, Announcement(_LINEAGE, self.version, DIGEST, "tcp://127.0.0.1:1"))

    def fill(self, num_groups: int) -> None:
        """Lease and return so many groups."""
        made = rollouts(tokens_for(_SIZE_BYTES), self.version)
        now = time.monotonic()
        leases = generator_requests.lease(self.state, "generator-0", (_LINEAGE, self.version), num_groups, now).leases
        assert len(leases) == num_groups
        self.commit()
        for lease in leases:
            payload = encode_group(
                make_group(lease.lease_id, lease.prompt.position, lease.lineage, made, "generator-0")
            )
            verdict, _ = generator_requests.receive(self.state, "generator-0", read_summary(payload), payload, now)
            assert verdict == "queued", verdict
        self.commit()

    def step(self) -> None:
        """Take a batch and acknowledge it."""
        now = time.monotonic()
        taken = learner_requests.take(self.state, _LINEAGE, self.version, self.version, now)
        assert not isinstance(taken, NotReady), taken.reason
        self.commit()
        num_rollouts = GROUPS_PER_STEP * GROUP_SIZE
        facts = TrainedCounts(True, num_rollouts, {}, num_rollouts * tokens_for(_SIZE_BYTES), {})
        learner_requests.ack(self.state, StepAck(_LINEAGE, self.version, self.version + 1, facts), now)
        self.version += 1
        self.announce()
        self.commit()


def cost_us(num_queued: int, journal_dir: Path, *, num_steps: int = 30) -> float:
    """CPU microseconds a group, with ``num_queued`` groups queued (a multiple of the step's) throughout."""
    journal_dir.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="queue-benchmark-depth-", dir=journal_dir) as name:
        journal, changes = Journal(Path(name)), Changes()
        rows = [Row(({"role": "user", "content": str(i)},), {"gt_answer": str(i)}) for i in range(_NUM_ROWS)]
        tokens = tokens_for(_SIZE_BYTES)
        bounds = {"max_staleness": _MAX_STALENESS, "max_bytes": 16 << 30, "lease_timeout_s": 3600.0}
        raw = {"run": {"dir": "none"}, "model": {"path": "none"}, "data": {"train": "none.jsonl"}, "queue": bounds}
        any_config = parse_config(raw, "benchmark")
        settings = replace(
            QueueSettings.from_config(any_config, vocab_size=None),
            group_size=GROUP_SIZE, groups_per_step=GROUPS_PER_STEP, run_ahead="bound",
            sampling=Sampling(1.0, 1.0, 0, tokens, PROMPT_TOKENS, ()),
        )  # fmt: skip
        state = QueueState(settings, rows, PromptStream(_NUM_ROWS, seed=0), payloads=journal, changes=changes)
        learner_requests.attach(state, _LINEAGE, "", 0, 0, 10_000_000, None, time.monotonic())
        queue = _Queue(state, changes, journal)
        queue.announce()
        try:
            for _ in range(num_queued // GROUPS_PER_STEP):
                queue.fill(GROUPS_PER_STEP)
            used_s = 0.0
            for index in range(num_steps + num_steps // 3):
                begun_s = time.process_time()
                queue.step()
                queue.fill(GROUPS_PER_STEP)
                # The first third warms up.
                used_s += time.process_time() - begun_s if index >= num_steps // 3 else 0.0
            return 1e6 * used_s / (num_steps * GROUPS_PER_STEP)
        finally:
            journal.close()
