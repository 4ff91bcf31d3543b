"""The section ``queue``: how stale groups may be, which are dropped, where the queue server listens and stores."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from async_rl.config.section import Section
from async_rl.errors import AddressError
from async_rl.net.address import check_address

OnStale = Literal["drop", "wait", "mask"]


class QueueConfig(Section):
    address: str | None = Field(default=None, description="to bind; none: loopback, any free port")
    advertise: str | None = Field(default=None, description="what others connect to; none: the bound address")
    max_staleness: int = Field(default=4, ge=0, le=1024, description="versions")
    on_stale: OnStale = Field(
        default="mask",
        description="tokens above the bound leave the loss; or drop their whole group; or wait, before a step, for "
        "groups that it would make too old, then drop",
    )
    wait_s: float = Field(default=60.0, gt=0, description='longest wait of a step under on_stale = "wait"')
    adaptive: bool = Field(
        default=False, description="lower the bound for new leases, up to max_staleness, while steps look too stale"
    )
    adaptive_min_ess: float = Field(default=0.95, gt=0, lt=1, description="a step of a lower ESS looks too stale")
    adaptive_max_kl: float = Field(default=0.02, gt=0, description="and one of a higher KL(mu || pi), nats")
    filter_range: tuple[float, float] | None = Field(
        default=(0.01, 0.99),
        strict=False,
        description="groups whose mean accuracy lies outside are filtered; [] is off",
    )
    refill: bool = Field(default=True, description="replace filtered groups; false: keep and mask them")
    max_filtered: int | None = Field(
        default=None, ge=1, description="filtered groups without a step; none: 100 steps' worth"
    )
    max_bytes: int = Field(default=2 << 30, ge=1 << 20)
    lease_timeout_s: float = Field(default=120.0, gt=0, description="without progress")
    max_attempts: int = Field(default=3, ge=1, description="per prompt, then it is set aside as poison")
    journal: bool = Field(default=True, description="keep groups and leases on disk, through the server's death")
    journal_dir: str | None = Field(default=None, description="on a local disk; none: run.dir/queue")
    keys: str | None = Field(
        default=None, description="directory of `async-rl keys new`; none: nothing is encrypted, loopback only"
    )
    max_messages_per_s: float = Field(default=5000.0, gt=0, description="of one client; more are dropped unanswered")
    max_malformed_per_minute: int = Field(default=64, ge=1, description="of one client; more: unheard for a minute")
    linger_s: float = Field(default=60.0, ge=0, description="the server ends so long after its learner went away")

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
