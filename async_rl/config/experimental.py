"""The section ``experimental``: what only tests and measurements set. Its keys may change without notice."""

from __future__ import annotations

from pydantic import Field

from async_rl.config.section import Section


class FakeConfig(Section):
    """The fake backend (``generator.backend = "fake"``), which makes tokens by hashing, at a chosen speed."""

    accuracy: float = Field(default=0.5, ge=0, le=1, description="Share of answers that are right.")
    mean_tokens: float = Field(default=16.0, ge=1, description="Mean number of tokens in an answer.")
    sigma: float = Field(
        default=0.0, ge=0, description="Standard deviation of the logarithm of the number of tokens in an answer."
    )
    step_time_s: float = Field(default=0.0, ge=0, description="Seconds of one decode step, whatever the batch.")
    vocab_size: int = Field(default=32, ge=2, description="Number of different tokens.")
    fails_on: str = Field(default="", description="Prompts that contain this text always fail; if empty, none do.")


class ExperimentalConfig(Section):
    """Keys for tests and measurements. They may change without notice."""

    adaptive_min_ess: float = Field(
        default=0.95,
        gt=0,
        lt=1,
        description="Effective sample size of a step, as a share of its tokens, below which queue.adaptive takes the "
        "data for too stale.",
    )
    adaptive_max_kl: float = Field(
        default=0.02,
        gt=0,
        description="KL(behavior policy || policy) of a step, in nats, above which queue.adaptive takes the data for "
        "too stale.",
    )
    journal: bool = Field(
        default=True,
        description="Whether the queue keeps groups and leases on disk, so that they outlive its process.",
    )
    max_messages_per_s: float = Field(
        default=5000.0,
        gt=0,
        description="Messages per second that the queue server accepts from one client; the rest are dropped.",
    )
    max_malformed_per_minute: int = Field(
        default=64,
        ge=1,
        description="Malformed messages per minute from one client after which the queue server ignores it for a "
        "minute.",
    )
    distributed_timeout_s: float = Field(
        default=600.0, gt=0, description="Seconds that a rank of the learner waits for the others before it gives up."
    )
    bucket_bytes: int = Field(
        default=64 << 20,
        ge=1024,
        description="Bytes of one bucket, the part of a version that has a digest of its own.",
    )
    parity_every: int = Field(
        default=50,
        ge=0,
        description="Versions between two comparisons of a generator's log-probabilities with the learner's; 0 "
        "compares only at the start.",
    )
    vllm_prepare_weights: bool = Field(
        default=True,
        description="Whether vLLM on a CPU prepares a version while it decodes, in a second copy of the weights; if "
        "false, it pauses.",
    )
    fake: FakeConfig = Field(default=FakeConfig(), description="The fake backend.")
