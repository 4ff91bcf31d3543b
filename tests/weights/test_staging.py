import threading

import pytest
import torch

from async_rl.errors import WeightsError
from async_rl.weights.manifest import digest_bytes
from async_rl.weights.receive_buffers import tensor_views
from async_rl.weights.staging import Staging

# 3 tensors of 100 float32: 400 bytes each, two to a bucket of 1000: bucket sizes 448 + 400 = 848, and 400.
VERSION_BYTES = 1248


def model(value: float) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((100,), float(value + i)) for i in range(3)}


def stage(staging: Staging, version: int):
    return staging.stage("l", version, iter(model(version).items()))


def assert_holds(staged, version: int) -> None:
    views = tensor_views(staged.manifest, staged.buckets)
    for name, tensor in model(version).items():
        assert torch.equal(views[name], tensor)
    assert staged.manifest.bucket_digests == tuple(digest_bytes(bytes(b.numpy())) for b in staged.buckets)


def test_a_staged_version_holds_every_byte_first_and_later():
    staging = Staging(None, 1000)
    for version in range(4):
        staged = stage(staging, version)
        assert staged.manifest.bucket_sizes == (848, 400)
        assert_holds(staged, version)
        staged.retire()


def test_staging_waits_for_the_buffer_that_is_being_sent():
    staging = Staging(VERSION_BYTES, 1000, deadline_s=30)
    first = stage(staging, 0)
    assert first.pin()
    ticks: list[int] = []

    def sent() -> None:
        first.retire()
        first.unpin()

    def tick() -> None:
        # Only now is the first one sent: it was still whole while the learner waited.
        assert_holds(first, 0)
        if not ticks:
            threading.Thread(target=sent).start()
        ticks.append(1)

    second = staging.stage("l", 1, iter(model(1).items()), tick=tick)
    assert ticks
    assert second.wait_s < 30
    assert_holds(second, 1)


def test_after_the_deadline_the_oldest_version_that_is_not_being_sent_is_dropped():
    staging = Staging(None, 1000, deadline_s=0.05)
    first, second = stage(staging, 0), stage(staging, 1)
    assert first.pin()
    third = stage(staging, 2)
    assert 0.05 <= third.wait_s < 5
    assert staging.num_dropped == 1
    assert not second.pin()
    assert_holds(first, 0)
    assert_holds(third, 2)


def test_a_delivered_version_gives_up_its_buffer_at_once_where_there_is_no_other():
    staging = Staging(VERSION_BYTES, 1000, deadline_s=30)
    first = stage(staging, 0)
    first.mark_delivered(True)
    second = stage(staging, 1)
    assert second.wait_s < 1
    assert staging.num_dropped == 0
    assert not first.pin()


def test_buffers_that_are_all_being_sent_past_the_deadline_are_an_error():
    staging = Staging(VERSION_BYTES, 1000, deadline_s=0.05)
    assert stage(staging, 0).pin()
    with pytest.raises(WeightsError, match=r"weights\.staging_bytes"):
        stage(staging, 1)


def test_a_version_that_can_not_fit_is_refused_with_the_figure_and_the_iterator_exhausted():
    staging = Staging(VERSION_BYTES - 1, 1000)
    left = iter(model(0).items())
    with pytest.raises(
        WeightsError,
        match=r"weights\.staging_bytes: expected at least 1248, since one version has 1248 bytes, got 1247",
    ):
        staging.stage("l", 0, left)
    assert next(left, None) is None


def test_other_tensors_than_before_are_refused_and_the_iterator_exhausted():
    staging = Staging(None, 1000)
    stage(staging, 0)
    for changed in (
        {**model(1), "w1": torch.zeros(99)},
        {**model(1), "more": torch.zeros(1)},
        {"w0": torch.zeros(100)},
    ):
        left = iter(changed.items())
        with pytest.raises(WeightsError, match="as in the version before"):
            staging.stage("l", 1, left)
        assert next(left, None) is None
    assert_holds(stage(staging, 2), 2)
