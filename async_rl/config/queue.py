"""The sections ``queue`` and ``weights``: how groups reach the learner, and how new weights reach the generators."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from async_rl.config.section import CodeName, Free, Recorded, Section
from async_rl.errors import AddressError
from async_rl.net.address import check_address

OnStale = Literal["drop", "wait", "mask"]


class QueueConfig(Section):
    """The queue server, and which groups it hands to the learner."""

    address: Free[str | None] = Field(
        default=None,
        description="Address that the queue server binds, as in tcp://0.0.0.0:5555; if unset, a free port on loopback.",
    )
    advertise: Free[str | None] = Field(
        default=None, description="Address that other machines connect to; if unset, the address that the server binds."
    )
    max_staleness: Recorded[int] = Field(
        default=4,
        ge=0,
        le=1024,
        description="Maximum number of versions between sampling a token and training on it; 0 is on-policy training, "
        "as is k - 1 with k updates of a batch.",
    )
    run_ahead: Recorded[Literal["auto", "bound"] | Annotated[float, Field(ge=0, le=1024)]] = Field(
        default="auto",
        description="How many batches may be in flight or ready while the learner trains one, within "
        "queue.max_staleness: auto is as many as keep the learner busy, by the measured times of groups and steps, so "
        "that data is as young as its answers allow; bound is as many as queue.max_staleness admits, as is auto with "
        "queue.on_stale = wait or learner.fixed_lag.",
    )
    on_stale: Recorded[OnStale] = Field(
        default="mask",
        description="What happens to tokens that are older than queue.max_staleness. mask: they are kept out of the "
        "loss; drop: their group is discarded; wait: as drop, but a step that would make groups too old while they are "
        "still being sampled first waits for them, for at most queue.wait_s.",
    )
    wait_s: Recorded[float] = Field(
        default=60.0,
        gt=0,
        description="Maximum seconds that a step waits for unfinished groups which would be too old to train on after "
        'it. Groups that are still unfinished then are cancelled. Only used with queue.on_stale = "wait".',
    )
    filter_range: tuple[float, float] | None = Field(
        default=(0.01, 0.99),
        strict=False,
        description="Groups whose mean accuracy is outside this range are filtered: they are never trained on. [] "
        "switches the filter off.",
    )
    filter_function: CodeName | None = Field(
        default=None,
        description="Your own filter as module:function or file.py:function: it says of each scored group whether it "
        'may be trained on, in addition to queue.filter_range (docs/rewards.md, "A filter of your own").',
    )
    refill: bool = Field(
        default=True,
        description="Whether another prompt replaces a filtered group; if false, the group is kept and masked.",
    )
    max_filtered: Recorded[int | None] = Field(
        default=None,
        ge=1,
        description="The run stops with a diagnosis when this many groups were filtered (queue.filter_range, "
        "queue.filter_function) since the learner's last step, because the data is then too easy or too hard; if "
        "unset, 100 times learner.groups_per_step.",
    )
    max_bytes: Free[int] = Field(
        default=2 << 30,
        ge=1 << 20,
        description="Maximum bytes of the groups in the queue, each in whole blocks of a disk. A group that a "
        "generator is still sampling counts with the largest size that it can reach.",
    )
    lease_timeout_s: Free[float] = Field(
        default=120.0,
        gt=0,
        description="Seconds without progress after which a generator's lease expires and its prompt is given out "
        "again.",
    )
    max_attempts: Recorded[int] = Field(
        default=3,
        ge=1,
        description="Number of attempts to sample a prompt that may fail, while other prompts succeed, before the "
        "prompt is excluded from the run. Attempts whose group became too old to train on are counted separately, with "
        "the same limit.",
    )
    max_outage_s: float = Field(
        default=3600.0,
        gt=0,
        description="Seconds for which the run waits while every lease fails, because a tool, a judge or a reward is "
        "away. The generators try again all the time. After it the run stops with the last error.",
    )
    max_refused_share: Recorded[float] = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of a generator's last 100 groups that the queue may refuse as invalid. Above it, the "
        "generator gets no more leases; if no other generator is alive, the run stops.",
    )
    linger_s: Free[float] = Field(
        default=600.0,
        ge=0,
        description="Seconds that the queue server waits for a lost learner before it exits with 1.",
    )
    journal_dir: Free[str | None] = Field(
        default=None,
        description="Directory on a local disk for the groups that the queue holds; if unset, run.dir/queue.",
    )
    keys: Free[str | None] = Field(
        default=None,
        description="Directory made by `async-rl keys new`, for encrypted and authenticated connections. A relative "
        "path starts at the working directory, not at the config's directory. If unset, only loopback is allowed.",
    )

    @field_validator("filter_range", mode="before")
    @classmethod
    def _empty_is_off(cls, value: object) -> object:
        return None if value in ([], ()) else value

    @field_validator("address", "advertise")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                check_address(value)
            except AddressError as error:
                raise ValueError(str(error)) from None
        return value


class WeightsConfig(Section):
    """How a new version of the weights reaches the generators."""

    transport: Free[Literal["auto", "tcp", "gloo", "nccl"]] = Field(
        default="auto",
        description="How weights reach the generators. If the whole run is on one host or on a trusted network, auto "
        "is nccl if the learner has CUDA, else gloo. Otherwise, or with weights.port, auto is tcp. One gloo broadcast "
        "has at most 32 ranks of generators; generators that join later fetch by tcp.",
    )
    port: Free[int | str | None] = Field(
        default=None,
        description="Ports at which the learner listens for the generators that fetch weights. A number N stands for N "
        'and N + 1; of a range such as "5556-5575" the learner takes the first two that are free. If unset, any free '
        "ports. If set, transport auto is tcp, because gloo and nccl choose their own ports.",
    )
    deltas: Free[Literal["auto", "on", "off"]] = Field(
        default="auto",
        description="Whether tcp sends only the weights that changed since the last version; auto does so only to "
        "other machines.",
    )
    peers: Free[bool] = Field(
        default=False,
        description="Whether generators fetch versions from each other, so that the learner sends each about once. "
        "They must be able to connect to each other (generator.peer_port). Only with transport tcp.",
    )
    sync_every: int = Field(
        default=1,
        ge=1,
        description="Number of versions from one publication of the weights to the next; 1 publishes every version.",
    )
    deadline_s: Free[float] = Field(
        default=60.0,
        gt=0,
        description="Seconds in which a generator must receive an offered version of the weights; with tcp, in which "
        "it must receive more of it. After that, the learner sends it no more weights until it joins again.",
    )
    staging_bytes: Free[int | None] = Field(
        default=None,
        ge=1024,
        description="Maximum bytes of host memory for versions that are being sent; if unset, room for two versions "
        "(tcp: three). With room for more, more older versions may go on being pulled by slow generators.",
    )
    parity: Free[Literal["stop", "warn", "off"]] = Field(
        default="stop",
        description="What happens if generator and learner compute different log-probabilities with the same weights: "
        "stop ends the run, warn logs it, off does not compare them. With stop and warn, a generator gets no more "
        "leases if its mean difference is above 1 nat; if experimental.parity_limit is set, above 20 times that limit.",
    )
    trusted_network: Free[bool] = Field(
        default=False,
        description="Whether all machines on the network are trusted, so that weights may travel unencrypted.",
    )

    @field_validator("port", mode="before")
    @classmethod
    def _is_port(cls, value: object) -> object:
        if value is not None:
            parse_ports(value)
        return value

    @property
    def ports(self) -> range | None:
        """The port numbers that ``port`` stands for, such as 5556 to 5575. None if it is not set."""
        return None if self.port is None else parse_ports(self.port)


def parse_ports(value: object) -> range:
    """Return the ports of a value of ``weights.port``: a number N stands for N and N + 1, text "N-M" for N to M.

    Raises:
        ValueError: the value is neither, or has fewer than two ports.
    """
    first = last = 0
    if isinstance(value, int) and not isinstance(value, bool):
        first, last = value, value + 1
    elif isinstance(value, str) and (match := re.fullmatch(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", value)):
        first, last = int(match[1]), int(match[2])
    if not 1 <= first < last <= 65535:
        raise ValueError(
            f'expected a port such as 5556 (for 5556 and 5557) or a range of at least two ports such as "5556-5575", '
            f"all from 1 to 65535, got {value!r}; correct it"
        )
    return range(first, last + 1)
