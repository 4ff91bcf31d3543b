"""What rewards have in common whose scores come from a service that may be away: their calls wait until it is back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from async_rl.rewards.records import RewardInput, RewardOutput


class ServiceClient(Protocol):
    """The connection to the service. ``close`` ends the calls that wait."""

    @property
    def trouble(self) -> str: ...
    @property
    def num_waiting(self) -> int: ...
    def close(self) -> None: ...


class ServedReward(ABC):
    """A reward that asks a service, whatever its scores mean."""

    is_async = True
    needs_whole_group = False

    def __init__(self, client: ServiceClient) -> None:
        self._service = client

    @property
    def trouble(self) -> str:
        """Why grading waits; empty if nothing is known to be wrong."""
        return self._service.trouble

    @property
    def num_waiting(self) -> int:
        """The number of answers that wait for the service."""
        return self._service.num_waiting

    def __call__(self, item: RewardInput) -> RewardOutput:
        return self.score_group([item])[0]

    @abstractmethod
    def score_group(self, items: Sequence[RewardInput]) -> list[RewardOutput]:
        """Return the reward of each answer, in their order."""

    def interrupt(self) -> None:
        """Let the calls that wait fail, and later ones too. Call it before the threads that call this are joined."""
        self._service.close()

    def close(self) -> None:
        self._service.close()
