import pytest

from async_rl.weights.channel.transports import choose_transport, obstacle
from async_rl.weights.control import CollectiveOffer


@pytest.mark.parametrize(
    ("setting", "has_cuda", "is_trusted", "expected"),
    [
        ("auto", False, True, "gloo"),
        ("auto", True, True, "nccl"),
        ("auto", False, False, "tcp"),
        ("auto", True, False, "tcp"),
        ("tcp", True, True, "tcp"),
        ("gloo", True, False, "gloo"),
    ],
)
def test_auto_is_a_collective_on_a_trusted_network_and_tcp_elsewhere(setting, has_cuda, is_trusted, expected):
    assert choose_transport(setting, has_cuda=has_cuda, is_trusted=is_trusted) == expected


@pytest.mark.parametrize("has_cuda", [False, True])
def test_with_ports_of_the_user_auto_takes_the_transport_that_uses_them(has_cuda: bool):
    assert choose_transport("auto", has_cuda=has_cuda, is_trusted=True, has_ports=True) == "tcp"


NCCL = CollectiveOffer("nccl", "2.29.7", ["GPU-0"])


@pytest.mark.parametrize(
    ("offered", "taken", "expected"),
    [
        ([CollectiveOffer("gloo"), CollectiveOffer("nccl", "2.29.7", ["GPU-1"])], [], ""),
        ([CollectiveOffer("nccl", "2.29.7", ["GPU-1", "GPU-2"])], ["GPU-3"], ""),
        ([CollectiveOffer("gloo")], [], "it can't use nccl"),
        ([CollectiveOffer("nccl", "2.28.9", ["GPU-1"])], [], "its version of nccl is 2.28.9, the learner's 2.29.7"),
        ([CollectiveOffer("nccl", "2.29.7", ["GPU-0"])], [], "shares the device GPU-0"),
        ([CollectiveOffer("nccl", "2.29.7", ["GPU-1", "GPU-2"])], ["GPU-2"], "shares the device GPU-2"),
    ],
)
def test_a_generator_takes_part_only_with_the_learners_library_and_a_device_of_its_own(offered, taken, expected: str):
    assert expected in obstacle(NCCL, offered, taken)
    assert bool(obstacle(NCCL, offered, taken)) == bool(expected)
