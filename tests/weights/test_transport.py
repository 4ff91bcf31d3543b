import pytest

from async_rl.weights.transport import choose_transport


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


def test_an_unknown_transport_is_a_bug():
    with pytest.raises(ValueError, match="'mpi'"):
        choose_transport("mpi", has_cuda=False, is_trusted=True)
