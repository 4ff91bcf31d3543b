"""``[extension.NAME]``: settings of installed packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.config.config import Config
from async_rl.config.extension import check_extension_settings, extension_settings
from async_rl.config.loading import changed_keys, config_from_toml, config_to_toml
from async_rl.errors import ConfigError, ExtensionError
from async_rl.launch.checks.extensions import find_packages
from tests.packages import install

SOURCE = """
from pydantic import BaseModel, Field

class Settings(BaseModel, extra="forbid"):
    limit: int = Field(default=3, ge=1)
"""
OFFERS = "[async_rl.config]\ngreeting = greeting:Settings\n[async_rl.rewards]\nwarm = greeting:warm\n"


def with_tables(tables: str) -> Config:
    return config_from_toml(f'run.dir = "run"\nmodel.path = "model"\n{tables}', "the test")


def test_a_table_is_read_as_the_model_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, "greeting", {"greeting.py": SOURCE}, OFFERS, monkeypatch)
    config = with_tables("extension.greeting.limit = 5")
    assert extension_settings(config, "greeting").model_dump() == {"limit": 5}
    assert extension_settings(with_tables(""), "greeting").model_dump() == {"limit": 3}
    again = config_from_toml(config_to_toml(config), "the file that the run wrote")
    assert again == config
    changed = changed_keys(config, with_tables("extension.greeting.limit = 6"))
    assert changed == {"extension.greeting.limit": (5, 6)}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ("extension.greeting.limit = 0", r"^extension\.greeting\.limit: expected at least 1, got 0"),
        ("extension.greeting.limits = 1", r"^extension\.greeting\.limits: unknown key"),
        ("extension.other.limit = 1", r"^extension\.other: expected .*which are: greeting; install the package"),
    ],
)
def test_a_wrong_table_is_refused_by_its_key(
    tables: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(tmp_path, "greeting", {"greeting.py": SOURCE}, OFFERS, monkeypatch)
    with pytest.raises(ConfigError, match=message):
        check_extension_settings(with_tables(tables))


def test_a_model_that_can_not_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, "greeting", {"greeting.py": "1 / 0"}, OFFERS, monkeypatch)
    with pytest.raises(ExtensionError, match=r"greeting:Settings, which the package greeting 1\.0 offers"):
        check_extension_settings(with_tables("extension.greeting.limit = 5"))


def test_the_doctor_lists_packages_and_names_broken_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path / "good", "greeting", {"greeting.py": SOURCE}, OFFERS, monkeypatch)
    install(tmp_path / "bad", "broken", {"broken.py": "1 / 0"}, "[async_rl.commands]\noops = broken:app\n", monkeypatch)
    findings = {(finding.state, finding.found) for finding in find_packages()}
    assert ("OK", "greeting 1.0 offers config: greeting, rewards: warm") in findings
    assert ("OK", "broken 1.0 offers commands: oops") in findings
    (warning,) = (found for state, found in findings if state == "WARN")
    assert warning.startswith("expected broken:app, which the package broken 1.0 offers as oops")
