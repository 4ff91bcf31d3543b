"""What copies a run to ``checkpoint.mirror`` is chosen by the protocol of the URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.config.config import Config
from async_rl.launch.checks.start import Start
from async_rl.launch.checks.table import CHECKS
from async_rl.learner.checkpoints.mirror import mirror_of
from tests.config.made import a_config
from tests.packages import install

TAPE = """
class Tape:
    @staticmethod
    def check(config):
        return f"no tape is in the drive of {config.checkpoint.mirror}; put one in"
"""


def config_of(directory: Path, **checkpoint: Any) -> Config:
    return a_config(directory, checkpoint=checkpoint)


def test_a_package_mirrors_to_a_protocol_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path / "site", "tapes", {"tapes.py": TAPE}, "[async_rl.mirrors]\ntape = tapes:Tape\n", monkeypatch)
    (check,) = (check for check in CHECKS if check.name == "checkpoint.mirror")
    (warning,) = check.findings(Start(config_of(tmp_path, mirror="tape://first")))
    assert (warning.state, warning.message) == (
        "WARN", "checkpoint.mirror: no tape is in the drive of tape://first; put one in",
    )  # fmt: skip
    assert list(check.findings(Start(config_of(tmp_path)))) == []
    known = mirror_of(config_of(tmp_path, mirror="memory://bucket"))
    assert known is not None
    assert known.check(config_of(tmp_path, mirror="memory://bucket")) == ""
    monkeypatch.undo()
