"""A generator's buffers: whatever the order of calls, bytes that the engine may read are never written to."""

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from async_rl.errors import WeightsError
from async_rl.weights.manifest import Manifest, digest_bytes
from async_rl.weights.receive_buffers import ReceiveBuffer, ReceiveBuffers, ReceivedWeights
from tests.examples import examples
from tests.weights.layouts import plan_layout

LAYOUT = plan_layout([("a", "float32", [4]), ("b", "uint8", [3])], 64)


def manifest_of(version: int, lineage: str = "l") -> Manifest:
    digests = tuple(digest_bytes(bytes([version % 256]) * size) for size in LAYOUT.bucket_sizes)
    return Manifest(lineage, version, LAYOUT.tensors, LAYOUT.bucket_sizes, digests)


def fill(buffer: ReceiveBuffer, version: int) -> None:
    for bucket in buffer.buckets:
        bucket.fill_(version % 256)


def intact(staged: ReceivedWeights) -> bool:
    raw = [t.reshape(-1).view(torch.uint8) for t in staged.tensors.values()]
    return all(bool((r == staged.version % 256).all()) for r in raw)


class Rotation(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.buffers = ReceiveBuffers()
        self.version = 0
        self.lineage = "l"
        self.handed_out: ReceivedWeights | None = None
        self.in_use: ReceivedWeights | None = None
        self.newest: int | None = None

    @rule(complete=st.booleans(), lineage=st.sampled_from(["l", "l", "m"]))
    def receive(self, complete: bool, lineage: str):
        self.version += 1
        manifest = manifest_of(self.version, lineage)
        buffer = self.buffers.reserve(manifest)
        fill(buffer, self.version)
        if complete:
            staged = self.buffers.commit(buffer, manifest, 0.0)
            self.newest = self.version if lineage == "l" else self.newest
            assert intact(staged)

    @rule()
    def poll(self):
        staged = self.buffers.newest("l")
        if staged is not None:
            assert staged.lineage == "l"
            self.handed_out = staged

    @precondition(lambda self: self.handed_out is not None)
    @rule()
    def activate(self):
        assert self.handed_out is not None
        self.buffers.activated(self.handed_out)
        self.in_use, self.handed_out = self.handed_out, None

    @invariant()
    def what_the_engine_may_read_is_whole(self):
        assert self.in_use is None or intact(self.in_use)
        assert self.handed_out is None or intact(self.handed_out)
        assert len(self.buffers._all) <= ReceiveBuffers.MAX_BUFFERS


Rotation.TestCase.settings = examples(60)
TestRotation = Rotation.TestCase


def received(buffers: ReceiveBuffers, version: int) -> ReceivedWeights:
    manifest = manifest_of(version)
    buffer = buffers.reserve(manifest)
    fill(buffer, version)
    return buffers.commit(buffer, manifest, 0.0)


def test_a_version_that_was_superseded_before_it_was_activated_is_refused():
    buffers = ReceiveBuffers()
    received(buffers, 1)
    first = buffers.newest("l")
    received(buffers, 2)
    second = buffers.newest("l")
    assert first is not None
    assert second is not None
    with pytest.raises(WeightsError, match="version 1 was activated after"):
        buffers.activated(first)
    buffers.activated(second)


def test_buckets_are_cut_from_the_given_memory_if_they_fit_in():
    memory = torch.zeros(256, dtype=torch.uint8)
    buffer = ReceiveBuffer([], memory=memory)
    assert buffer.fit(manifest_of(1))
    fill(buffer, 7)
    assert [bucket.numel() for bucket in buffer.buckets] == list(LAYOUT.bucket_sizes)
    assert all(bucket.data_ptr() % 64 == memory.data_ptr() % 64 for bucket in buffer.buckets)
    assert int((memory == 7).sum()) == LAYOUT.size_bytes
    assert not buffer.fit(manifest_of(2))
