"""The sections ``run``, ``checkpoint``, ``log`` and ``experimental``.

They say where a run is stored, when it is saved, what it logs, and which settings tests and measurements change.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from async_rl.config.section import Free, OnResume, Recorded, Section
from async_rl.redaction import redacted


class RunConfig(Section):
    """Where the files of a run are, what the run is called, and its random seed."""

    dir: Free[str] = Field(
        min_length=1,
        description="Directory for everything that the run writes; starting again with the same directory resumes it.",
    )
    name: Free[str] = Field(
        default="",
        description="Name of the run on the screen and in the tools of log.to; if empty, the last part of run.dir.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**31,
        description="Random seed for the order of the data, for sampling and for new adapter weights.",
    )
    on_code_change: Free[Literal["refuse", "accept"]] = Field(
        default="refuse",
        description="What happens if a run is resumed and the source of your own code (rewards, environments, agents, "
        'losses, advantages) has changed: "refuse" stops, "accept" trains on and records the change with its step.',
    )
    stop_on_collapse: Free[bool] = Field(
        default=False,
        description="Whether the run saves a checkpoint and stops with exit code 1 when its metrics show that the "
        "policy collapses (docs/troubleshooting.md). If false, it only says so.",
    )


class CheckpointConfig(Section):
    """When the learner saves model, optimizer and queue, so that the run can resume."""

    on_resume: ClassVar[OnResume] = OnResume.FREE

    every: int = Field(default=50, ge=0, description="Steps between two checkpoints; 0 writes one only at the end.")
    keep_last: int = Field(
        default=2,
        ge=1,
        description="Number of newest checkpoints that stay on disk. If the newest is damaged, the run resumes from "
        "the one before it; with 1 there is none.",
    )
    keep_every: int = Field(
        default=0,
        ge=0,
        description="Steps between two checkpoints that stay on disk for ever, in addition to the newest: those of its "
        "multiples. A multiple of checkpoint.every; 0 keeps only the newest.",
    )
    asynchronous: bool = Field(
        default=True,
        description="Whether checkpoints are written while training goes on. A step then "
        "waits only until each rank has copied its part of model and optimizer to host memory, which is kept for the "
        "next copy. If false, training waits until all is written, and nothing is copied.",
    )
    mirror: str | None = Field(
        default=None,
        description="URL of an empty place in an object store, such as s3://bucket/path, gs://, hf:// or "
        "file:///mnt/path (any of fsspec), to which checkpoints, exports, rollouts and metrics are copied behind the "
        "run. With an empty run.dir the run comes back from there (docs/reliability.md).",
    )
    mirror_wait_s: float = Field(
        default=600.0,
        ge=0,
        description="Longest wait, in seconds, at the end of a run until the mirror has everything.",
    )
    mirror_may_lose: int = Field(
        default=0,
        ge=0,
        description="Last step whose checkpoint in the mirror may be removed although run.dir is older, lost it, or "
        "went another way; 0 removes nothing of that kind. The message that names it says when to "
        "(docs/reliability.md).",
    )
    grace_s: float = Field(
        default=25.0,
        gt=0,
        description="Seconds in which `async-rl learner` and `async-rl sft` save a checkpoint and end after SIGTERM or "
        "SIGINT. After that they end without one. Slurm, Kubernetes and torchrun kill a process after 30 s by default.",
    )

    @field_validator("mirror")
    @classmethod
    def _is_a_url_without_secrets(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^@?#:\s]+", value):
            raise ValueError(
                "expected a URL such as s3://bucket/path or file:///mnt/path, without user, password and options, "
                "because configs are stored and logged: the store's package has its own place for credentials; got "
                + redacted(value).partition("?")[0]
            )
        return value

    @model_validator(mode="after")
    def _keeps_what_is_written(self) -> Self:
        if self.keep_every and (not self.every or self.keep_every % self.every):
            raise ValueError(
                f"keep_every: expected a multiple of checkpoint.every = {self.every}, because other steps have no "
                f"checkpoint, got {self.keep_every}; change one of them"
            )
        return self


class LogConfig(Section):
    """What is logged in addition to ``metrics.jsonl``."""

    on_resume: ClassVar[OnResume] = OnResume.FREE

    to: tuple[str, ...] = Field(
        strict=False,
        default=(),
        description="Where metrics and sampled rollouts also go; those of sft, dpo, rm and eval too: wandb, "
        "tensorboard, trackio, mlflow, or a sink that another package offers. None of them can stop or delay a run "
        "that has begun (docs/watching.md).",
    )
    wandb_mode: Literal["online", "offline"] = Field(
        default="online",
        description="Whether wandb sends over the network, or writes files for `wandb sync`.",
    )
    project: str = Field(
        default="async-rl",
        min_length=1,
        description="Name of the project in wandb and Trackio, and of MLflow's experiment.",
    )
    prometheus_port: int | None = Field(
        default=None,
        ge=1024,
        le=60000,
        description="Port at which the queue server serves metrics for Prometheus. The learner has the next one, and "
        "the generators that launch starts those after it. If unset, none is served (docs/watching.md).",
    )
    prometheus_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address at which metrics are served; 0.0.0.0 for every network. Whoever reaches it can read them.",
    )
    rollouts_every: int = Field(
        default=10,
        ge=0,
        description="Steps between two files of sampled rollouts in the run directory, from the first on; the last "
        "step has one, too. 0 writes none.",
    )
    rollouts_groups: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        default=2,
        description='Number of groups in one file of sampled rollouts, chosen at random from those of its step; "all"'
        " writes every group.",
    )
    rollouts_tokens: int = Field(
        default=50_000,
        ge=0,
        description="Most tokens in one file of token columns beside those rollouts: version, log-probabilities, "
        "advantage and outcome of each token. Further rollouts have their text only; 0 writes no such files.",
    )
    replayable: bool = Field(
        default=False,
        description="Whether all rollouts of all steps are recorded, whatever log.rollouts_* say, so that async-rl "
        "replay can train on them again.",
    )
    profile: str = Field(
        default="",
        description="Steps of which rank 0 of the learner writes a trace into profile/ in the run directory, such as 3 "
        "or 3-5; if empty, none.",
    )

    @field_validator("to")
    @classmethod
    def _names_each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"expected each tool once, got {', '.join(value)}; leave out the repeated one")
        if wrong := next((name for name in value if not re.fullmatch(r"\w[\w.-]*", name)), None):
            raise ValueError(f"expected names of letters, digits, '_', '.' and '-', got {wrong!r}; correct it")
        return value

    @field_validator("profile")
    @classmethod
    def _is_a_range(cls, value: str) -> str:
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", value)
        if value and (found is None or not 1 <= int(found[1]) <= int(found[2] or found[1])):
            raise ValueError(f"expected a step such as 3, or steps such as 3-5, got {value!r}; steps count from 1")
        return value

    @property
    def profiled_steps(self) -> range:
        """The steps that ``profile`` names."""
        if not self.profile:
            return range(0)
        first, _, last = self.profile.partition("-")
        return range(int(first), int(last or first) + 1)


class FakeConfig(Section):
    """The fake backend (``generator.backend = "fake"``), which makes tokens by hashing, at a chosen speed."""

    accuracy: float = Field(default=0.5, ge=0, le=1, description="Share of the fake backend's answers that are right.")
    mean_tokens: float = Field(
        default=16.0, ge=1, description="Mean number of tokens in an answer of the fake backend."
    )
    sigma: float = Field(
        default=0.0,
        ge=0,
        description="Standard deviation of the logarithm of the number of tokens in an answer of the fake backend.",
    )
    step_time_s: float = Field(
        default=0.0, ge=0, description="Seconds of one decode step of the fake backend, whatever the batch."
    )
    vocab_size: int = Field(default=32, ge=2, description="Number of different tokens of the fake backend.")
    fails_on: str = Field(
        default="", description="Prompts that contain this text always fail on the fake backend; if empty, none do."
    )


class VllmConfig(Section):
    """The vLLM backend (``generator.backend = "vllm"``)."""

    kv_cache_bytes: int | None = Field(
        default=None,
        ge=1 << 20,
        description="Bytes for cached keys and values; if unset, what generator.memory_fraction leaves, and 1 GiB on "
        "a CPU.",
    )
    enforce_eager: bool | None = Field(
        default=None, description="Whether vLLM runs without compiled graphs; if unset, it does so only on a CPU."
    )
    model_runner: Literal["v1", "v2"] | None = Field(
        default=None,
        description="The model runner of vLLM's workers; if unset, vLLM chooses: v2 where Triton works, as on a GPU, "
        "else v1. The generator's log says which one runs.",
    )


class ExperimentalConfig(Section):
    """Keys for tests and measurements. They may change without notice."""

    journal: bool = Field(
        default=True,
        description="Whether the queue keeps groups and leases on disk, so that they survive its process.",
    )
    max_messages_per_s: Free[float] = Field(
        default=5000.0,
        gt=0,
        description="Messages per second that the queue server accepts from one client; the rest are dropped.",
    )
    max_malformed_per_minute: Free[int] = Field(
        default=64,
        ge=1,
        description="Malformed messages per minute from one client after which the queue server ignores it for a "
        "minute.",
    )
    distributed_timeout_s: Free[float] = Field(
        default=600.0, gt=0, description="Seconds that a rank of the learner waits for the others before it gives up."
    )
    bucket_bytes: Free[int] = Field(
        default=64 << 20,
        ge=1024,
        description="Bytes of one bucket. A version of the weights is divided into buckets, each with its own digest.",
    )
    parity_every: Free[int] = Field(
        default=50,
        ge=0,
        description="Versions between two comparisons of a generator's log-probabilities with the learner's; 0 "
        "compares only at the start.",
    )
    parity_limit: Free[float | None] = Field(
        default=None,
        gt=0,
        description="Mean difference, in nats, between the log-probabilities of a generator and of the learner above "
        "which weights.parity acts; if unset, 0.001 where both compute in float32, else 0.05.",
    )
    max_skipped_steps: Recorded[int] = Field(
        default=10,
        ge=1,
        description="Number of optimizer steps of one model, the policy or the critic, that may be skipped in a row; "
        "one more stops the run.",
    )
    vllm: Free[VllmConfig] = Field(default=VllmConfig(), description="The vLLM backend.")
    fake: FakeConfig = Field(default=FakeConfig(), description="The fake backend.")
