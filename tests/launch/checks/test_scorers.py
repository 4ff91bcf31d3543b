"""A launch refuses a scorer whose address is taken, or whose model is no reward model."""

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.config import Config
from async_rl.errors import AddressError, ModelError
from async_rl.launch.checks.addresses import scorers_away
from async_rl.launch.checks.models import check_scorers
from tests.scorer.client.scripted import RunningScorer, ScriptedModel, free_address


def a_config(model: Path, **scorer: Any) -> Config:
    table = {"model": str(model), "address": free_address(), **scorer}
    return Config.model_validate({
        "run": {"dir": "r"}, "model": {"path": "m"}, "queue": {"filter_range": []},
        "reward": {"type": "model", "model": "judge"}, "scorer": {"judge": table},
    })  # fmt: skip


def with_config_json(directory: Path, architecture: str, num_labels: int) -> Path:
    labels = {str(index): f"LABEL_{index}" for index in range(num_labels)}
    content = {"architectures": [architecture], "id2label": labels}
    (directory / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def test_a_reward_model_at_a_free_address_passes(tmp_path: Path):
    list(check_scorers(a_config(with_config_json(tmp_path, "Qwen2ForSequenceClassification", 1)), insecure=False))


@pytest.mark.parametrize(
    ("architecture", "num_labels"), [("Qwen2ForCausalLM", 1), ("Qwen2ForSequenceClassification", 2)]
)
def test_another_model_is_refused(tmp_path: Path, architecture: str, num_labels: int):
    with pytest.raises(ModelError, match=r"scorer\.judge\.model: expected a sequence-classification model"):
        list(check_scorers(a_config(with_config_json(tmp_path, architecture, num_labels)), insecure=False))


def test_a_taken_or_open_address_is_refused(tmp_path: Path):
    config = a_config(tmp_path)
    refused = pytest.raises(AddressError, match=r"scorer\.judge\.address: can't bind")
    with RunningScorer(config.scorer["judge"].address, ScriptedModel()), refused:
        list(check_scorers(config, insecure=False))
    with pytest.raises(AddressError, match=r"scorer\.judge\.address: .*not authenticated"):
        list(check_scorers(a_config(tmp_path, address="tcp://192.0.2.1:5570"), insecure=False))


def test_a_scorer_that_somebody_else_starts_is_looked_for():
    config = a_config(Path("rm"), launch=False)
    (away,) = scorers_away(config)
    assert (away.check, away.state, "nothing listens" in away.found) == ("scorer.judge", "WARN", True)
    with RunningScorer(config.scorer["judge"].address, ScriptedModel()):
        assert not list(scorers_away(config))
    assert not list(check_scorers(config, insecure=False))  # launch leaves it alone
