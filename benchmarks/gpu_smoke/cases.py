"""The table of cases, in the order in which they run: the cheap ones first."""

from __future__ import annotations

from functools import partial

from benchmarks.gpu_smoke import attention, engine, ranks, runs, transfer
from benchmarks.gpu_smoke.case import Case

_run = partial(Case, after="warm-start")

_CASES = (
    Case("attention", attention.check),
    *(Case(f"attention-{n}", partial(attention.check_other, n), num_devices=1) for n in ("fa3", "fa4")),
    Case("head-gradient", engine.check_head),
    *(
        Case(
            f"engine-{name}",
            partial(engine.check_option, name),
            num_devices=int(name in engine.ON_DEVICE),
            # The compiler alone took 88 s on two busy cores.
            deadline_s=240 if name == "compiled" else 120,
        )
        for name in engine.OPTIONS
    ),
    Case("deterministic", engine.check_deterministic),
    Case("no-sync", engine.check_no_sync, num_devices=1),
    Case("throughput", engine.check_throughput, deadline_s=240),
    Case("staging", transfer.check_staging),
    Case("version", transfer.check_version),
    Case("gloo-communicators", transfer.check_gloo),
    Case("nccl-alone", transfer.check_nccl_alone, num_devices=1, package="nccl"),
    Case("nccl-pair", transfer.check_nccl_pair, num_devices=2, package="nccl"),
    *(Case(f"ranks-{name}", partial(ranks.check_layout, name), deadline_s=240) for name in ranks.LAYOUTS),
    Case("ranks-dead", ranks.check_dead_rank),
    Case("warm-start", runs.warm_start, deadline_s=300),
    _run("run-tcp", runs.check_tcp),
    _run("run-gloo", runs.check_gloo, deadline_s=240),
    _run("run-killed", runs.check_killed, deadline_s=240),
    _run("run-vllm", runs.check_vllm, num_devices=1, package="vllm", deadline_s=300),
    _run("run-vllm-in-learner", runs.check_vllm_in_learner, num_devices=1, package="vllm", deadline_s=300),
    _run("run-two-ranks", runs.check_two_ranks),
    _run("run-torchrun", runs.check_torchrun),
    _run("run-nccl", runs.check_nccl, num_devices=2, package="nccl", deadline_s=240),
    _run("run-nccl-frozen", runs.check_nccl_frozen, num_devices=3, package="nccl", deadline_s=240),
    _run("run-vllm-nccl", runs.check_vllm_nccl, num_devices=2, package="vllm", deadline_s=300),
    _run("run-vllm-tp2", runs.check_vllm_tensor_parallel, num_devices=3, package="vllm", deadline_s=300),
    _run("quickstart", runs.check_quickstart, deadline_s=300),
)

CASES = {case.name: case for case in _CASES}
