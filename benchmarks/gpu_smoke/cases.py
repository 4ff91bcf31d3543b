"""The table of cases, in the order in which they run: the cheap ones first."""

from __future__ import annotations

from functools import partial

from benchmarks.gpu_smoke import attention, engine, runs, transfer
from benchmarks.gpu_smoke.case import Case

_CASES = (
    Case("attention", attention.check),
    Case("head-gradient", engine.check_head),
    *(
        Case(f"engine-{name}", partial(engine.check_option, name), num_devices=int(name in engine.ON_DEVICE))
        for name in engine.OPTIONS
    ),
    Case("deterministic", engine.check_deterministic),
    Case("no-sync", engine.check_no_sync),
    Case("throughput", engine.check_throughput, deadline_s=240),
    Case("staging", transfer.check_staging),
    Case("version", transfer.check_version),
    Case("gloo-communicators", transfer.check_gloo),
    Case("nccl-alone", transfer.check_nccl_alone, num_devices=1, package="nccl"),
    Case("nccl-pair", transfer.check_nccl_pair, num_devices=2, package="nccl"),
    Case("run-tcp", runs.check_tcp),
    Case("run-gloo", runs.check_gloo, deadline_s=240),
    Case("run-killed", runs.check_killed, deadline_s=240),
    Case("run-vllm", runs.check_vllm, num_devices=1, package="vllm", deadline_s=300),
    Case("run-vllm-in-learner", runs.check_vllm_in_learner, num_devices=1, package="vllm", deadline_s=300),
    Case("run-two-ranks", runs.check_two_ranks),
    Case("run-torchrun", runs.check_torchrun),
    Case("run-nccl", runs.check_nccl, num_devices=2, package="nccl", deadline_s=240),
    Case("run-nccl-frozen", runs.check_nccl_frozen, num_devices=3, package="nccl", deadline_s=240),
    Case("run-vllm-nccl", runs.check_vllm_nccl, num_devices=2, package="vllm", deadline_s=300),
    Case("run-vllm-tp2", runs.check_vllm_tensor_parallel, num_devices=3, package="vllm", deadline_s=300),
    Case("quickstart", runs.check_quickstart, deadline_s=300),
)

CASES = {case.name: case for case in _CASES}
