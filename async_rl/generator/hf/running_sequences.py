"""The running sequences of the transformers backend as columns of arrays. Numpy only.

Rows 0 to ``num_rows - 1`` are in use; when a sequence leaves, the last one takes its row, so that a decode step
computes no empty row. One step's bookkeeping is a handful of array operations, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from async_rl.generator.counter_random import rollout_keys
from async_rl.records import Lease
from async_rl.sampling_mask import SamplingMask, split


@dataclass(frozen=True, slots=True, eq=False)
class RunningSequence:
    """One running sequence: sample ``index`` of the lease.

    ``sampling_mask`` grows by a set for each token; None if the lease's sampling ``keeps_all``.
    """

    lease: Lease
    index: int
    prompt_ids: np.ndarray
    sampling_mask: list[SamplingMask] | None


class RunningSequences:
    """Columns, each [max_running]; only the first ``num_rows`` entries mean anything.

    Attributes:
        next_ids: int64, the token to feed next; position: int64, where it goes.
        num_sampled: int64; max_sampled: int64; key: uint64, the sequence's random stream.
        temperature, top_p: float64; top_k: int64; has_stop: bool.
    """

    def __init__(self, max_running: int) -> None:
        self.num_rows = 0
        self.sequences: list[RunningSequence] = []
        self.next_ids = np.zeros(max_running, np.int64)
        self.position = np.zeros(max_running, np.int64)
        self.num_sampled = np.zeros(max_running, np.int64)
        self.max_sampled = np.zeros(max_running, np.int64)
        self.key = np.zeros(max_running, np.uint64)
        self.temperature = np.zeros(max_running, np.float64)
        self.top_p = np.zeros(max_running, np.float64)
        self.top_k = np.zeros(max_running, np.int64)
        self.has_stop = np.zeros(max_running, np.bool_)
        self._tokens = np.zeros((max_running, 64), np.int32)
        self._logprobs = np.zeros((max_running, 64), np.float32)
        self._versions = np.zeros((max_running, 64), np.int32)
        self._row_index = np.arange(max_running)

    @property
    def num_free(self) -> int:
        return len(self.position) - self.num_rows

    @property
    def length(self) -> int:
        """Tokens that the longest row has after the next forward pass."""
        return int(self.position[: self.num_rows].max()) + 1

    @property
    def max_length(self) -> int:
        """Tokens that the longest row can ever have in the cache."""
        rows = slice(0, self.num_rows)
        return int((self.position[rows] + self.max_sampled[rows] - self.num_sampled[rows]).max()) + 1

    def add(self, lease: Lease, prompt_ids: np.ndarray, first_index: int, count: int) -> int:
        """Add samples ``first_index`` and on of the lease; the first row they took."""
        first_row = self.num_rows
        rows = slice(first_row, first_row + count)
        self.num_rows += count
        keeps_all = lease.sampling.keeps_all
        self.sequences.extend(
            RunningSequence(lease, first_index + i, prompt_ids, None if keeps_all else []) for i in range(count)
        )
        # The prompt's last token is fed by the first decode step, so the prefix in the cache is one shorter.
        self.next_ids[rows] = prompt_ids[-1]
        self.position[rows] = len(prompt_ids) - 1
        self.num_sampled[rows] = 0
        self.max_sampled[rows] = lease.sampling.max_new_tokens
        self.key[rows] = rollout_keys(lease.seed, np.arange(first_index, first_index + count))
        self.temperature[rows] = lease.sampling.temperature
        self.top_p[rows] = lease.sampling.top_p
        self.top_k[rows] = lease.sampling.top_k
        self.has_stop[rows] = bool(lease.sampling.stop)
        return first_row

    def record(self, tokens_R: np.ndarray, logprobs_R: np.ndarray, version: int) -> None:
        """Note one sampled token a row."""
        rows = slice(0, self.num_rows)
        column = self.num_sampled[rows]
        if int(column.max()) >= self._tokens.shape[1]:
            self._tokens, self._logprobs, self._versions = (
                np.concatenate([a, np.zeros_like(a)], axis=1) for a in (self._tokens, self._logprobs, self._versions)
            )
        row = self._row_index[rows]
        self._tokens[row, column] = tokens_R
        self._logprobs[row, column] = logprobs_R
        self._versions[row, column] = version
        self.next_ids[rows] = tokens_R
        self.position[rows] += 1
        self.num_sampled[rows] += 1

    def record_masks(self, kept: SamplingMask) -> None:
        """Note what the newest tokens were chosen from: a set for each row that does not keep all, in order."""
        sets = [sequence.sampling_mask for sequence in self.sequences if sequence.sampling_mask is not None]
        for of_row, newest in zip(sets, split(kept, [1] * len(sets)), strict=True):
            of_row.append(newest)

    def sampled(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Copies of the row's token ids (int32 [N]), logprobs (float32 [N]) and versions (int32 [N])."""
        count = self.num_sampled[row]
        return self._tokens[row, :count].copy(), self._logprobs[row, :count].copy(), self._versions[row, :count].copy()

    def last_tokens(self, row: int, count: int) -> np.ndarray:
        """At most ``count`` newest tokens of the row."""
        end = int(self.num_sampled[row])
        return self._tokens[row, max(0, end - count) : end]

    def remove(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Remove these rows; the (sources, destinations) by which the last rows filled the gaps."""
        leaving = set(rows)
        remaining = self.num_rows - len(leaving)
        gaps = sorted(row for row in leaving if row < remaining)
        movers = [row for row in range(remaining, self.num_rows) if row not in leaving]
        for column in (
            self.next_ids, self.position, self.num_sampled, self.max_sampled, self.key, self.temperature, self.top_p,
            self.top_k, self.has_stop, self._tokens, self._logprobs, self._versions,
        ):  # fmt: skip
            column[gaps] = column[movers]
        for source, destination in zip(movers, gaps, strict=True):
            self.sequences[destination] = self.sequences[source]
        del self.sequences[remaining:]
        self.num_rows = remaining
        return movers, gaps
