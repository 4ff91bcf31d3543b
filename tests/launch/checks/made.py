"""Make rows of the table of checks, as the doctor does."""

from typing import Any

from async_rl.config.config import Config
from async_rl.launch.checks.finding import Finding
from async_rl.launch.checks.start import Start
from async_rl.launch.checks.table import CHECKS, NOT_MADE, caught, findings_of

OF_MODEL = ("model", "template", "tokenizer", "special tokens", "end of turn", "first prompt")
OF_REWARD = ("code", "judge", "own reward", "reward")


def made(config: Config, *names: str, **start: Any) -> list[Finding]:
    """What the checks of these names find, in the table's order, without those that are skipped for another's sake."""
    this = Start(config, **start)
    checks = [check for check in CHECKS if check.name in names and this.role in check.roles]
    assert {check.name for check in checks} == set(names)
    found = findings_of(checks, lambda check: caught(check, this))
    return [finding for finding in found if finding.check != NOT_MADE]
