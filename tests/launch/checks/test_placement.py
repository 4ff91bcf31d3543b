"""Which process gets which GPU: a table of machines and configs."""

from __future__ import annotations

from typing import Any

import pytest

from async_rl.config.config import Config
from async_rl.errors import ConfigError
from async_rl.launch.checks.placement import Placement, place, visible_devices
from tests.config.made import a_config

EIGHT = [str(index) for index in range(8)]


def placed(
    visible: list[str], learner: dict[str, Any], generator: dict[str, Any], *, is_limited: bool = False
) -> Placement:
    config = a_config(learner=learner, generator={"backend": "vllm", **generator})
    return place(config, visible, is_limited=is_limited)


SITUATIONS: dict[str, tuple[list[str], dict[str, Any], dict[str, Any], Placement]] = {
    "no GPU": ([], {}, {}, Placement()),
    "one GPU is shared": (["0"], {}, {}, Placement(("0",), (("0",),))),
    "one GPU is shared by all": (["0"], {}, {"count": 3}, Placement(("0",), (("0",),) * 3)),
    "two GPUs": (["0", "1"], {}, {}, Placement(("0",), (("1",),))),
    "eight GPUs, four ranks": (
        EIGHT, {"nproc": 4}, {"count": 4}, Placement(("0", "1", "2", "3"), (("4",), ("5",), ("6",), ("7",)))
    ),
    "eight GPUs, generators over two": (
        EIGHT, {"nproc": 2}, {"count": 3, "tensor_parallel_size": 2},
        Placement(("0", "1"), (("2", "3"), ("4", "5"), ("6", "7"))),
    ),
    "some stay free": (EIGHT, {}, {"count": 2}, Placement(("0",), (("1",), ("2",)))),
    "the learner's are chosen": (EIGHT, {"devices": [1]}, {"count": 2}, Placement(("1",), (("0",), ("2",)))),
    "the generators' are chosen": (EIGHT, {"nproc": 2}, {"devices": [0]}, Placement(("1", "2"), (("0",),))),
    "both are chosen, and share": (["0"], {"devices": [0]}, {"devices": [0]}, Placement(("0",), (("0",),))),
    "no generator here": (["0", "1"], {"nproc": 2}, {"count": 0}, Placement(("0", "1"), ())),
    "generators without a model need none": (["0"], {}, {"backend": "fake", "count": 3}, Placement(("0",), ((),) * 3)),
    "UUIDs and a part of a GPU": (["GPU-a", "MIG-b"], {}, {}, Placement(("GPU-a",), (("MIG-b",),))),
}  # fmt: skip


@pytest.mark.parametrize("situation", SITUATIONS)
def test_gpus_are_dealt_to_ranks_first_and_then_to_generators(situation: str):
    visible, learner, generator, expected = SITUATIONS[situation]
    assert placed(visible, learner, generator) == expected


@pytest.mark.parametrize(
    ("visible", "learner", "generator", "message"),
    [
        (["0"], {"nproc": 2}, {}, r"learner.nproc = 2 ranks and .* 1 x 1 parts of generators, got 1; lower these"),
        (["0", "1"], {"nproc": 2}, {}, "got 2; lower these, set .* to share GPUs, or hide the GPUs"),
        (EIGHT, {"nproc": 4}, {"count": 3, "tensor_parallel_size": 2}, "3 x 2 parts of generators, got 8"),
        (["0", "1"], {"devices": [0]}, {"count": 2}, "2 x 1 parts of generators, got 2"),
    ],
)
def test_too_few_gpus_are_refused(visible: list[str], learner: dict[str, Any], generator: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        placed(visible, learner, generator)


@pytest.mark.parametrize(
    ("visible", "device", "expected"),
    [
        (["0"], None, ("0",)),  # shared, as by the generator
        (["0", "1", "2"], None, ("2",)),
        (["0", "1"], 1, ("1",)),  # chosen, and shared with the generator
        ([], None, ()),
    ],
)
def test_a_scorer_has_a_gpu_of_its_own_or_says_how_to_share_one(
    visible: list[str], device: int | None, expected: tuple[str, ...]
):
    assert place(with_scorer(device), visible, is_limited=False).scorers == expected
    with pytest.raises(ConfigError, match=r"scorer\.judge: .*set scorer\.judge\.device to share one"):
        place(with_scorer(None), ["0", "1"], is_limited=False)


def with_scorer(device: int | None) -> Config:
    scorer = {"model": "rm", "address": "tcp://127.0.0.1:1"} | ({} if device is None else {"device": device})
    reward = {"type": "model", "model": "judge"}
    return a_config(generator={"backend": "vllm"}, queue={"filter_range": []}, reward=reward, scorer={"judge": scorer})


def test_a_limited_environment_is_numbered_from_0():
    slurm = visible_devices({"CUDA_VISIBLE_DEVICES": "4, 5,GPU-x"})
    assert slurm == ["4", "5", "GPU-x"]
    assert placed(slurm, {"devices": [2]}, {}, is_limited=True) == Placement(("GPU-x",), (("4",),))
    with pytest.raises(ConfigError, match=r"learner.devices: expected indices below 3, .*'4,5,GPU-x', got 5"):
        placed(slurm, {"devices": [5]}, {}, is_limited=True)


def test_hidden_gpus_are_none():
    assert [visible_devices({"CUDA_VISIBLE_DEVICES": value}) for value in ("", "-1")] == [[], []]


def test_the_plan_is_one_line():
    assert Placement(("0", "1"), (("2", "3"), ("4",))).line == (
        "learner-0 on 0, learner-1 on 1, generator-0 on 2+3, generator-1 on 4"
    )
    assert Placement().line == Placement(None, ((),)).line == ""
