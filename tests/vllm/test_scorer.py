"""The scorer's process with vLLM gives each text the score that transformers gives it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.config.scorer import ScorerConfig
from async_rl.errors import RewardError
from async_rl.scorer.client.messages import Received, TextQuestion
from async_rl.scorer.client.scorer_client import ScorerClient
from async_rl.scorer.reward_model import RewardModel
from tests.end_to_end.harness import Role, roles, wait_until, write_config
from tests.ports import free_address
from tests.scorer.test_reward_model import MESSAGES, write_reward_model
from tests.vllm.test_processes import descendants

pytestmark = pytest.mark.vllm

# Two blocks of the prefix cache and more in common, and texts of more tokens than a step has.
TEXTS = [f"={number}" for number in range(30)] + ["+1" * 20 + end for end in ("", "=2", "=3", "=22")] + ["", "=" * 93]


def scores(client: ScorerClient, texts: list[str]) -> np.ndarray:
    """Of the scorer, float32 [N]."""
    return np.array([future.result(200)[0][0] for future in [client.score(MESSAGES, text) for text in texts]])


def serving(role: Role) -> bool:
    assert role.process.poll() is None, role.tail()
    return "has the digest" in role.log


@pytest.mark.timeout(400)
def test_a_scorer_with_vllm_scores_as_transformers_does_and_killed_it_leaves_nothing_behind(tmp_path: Path):
    # Heads of 32 dimensions, which vLLM's kernels for the CPU take.
    directory = write_reward_model(tmp_path / "rm", hidden_size=64, max_position_embeddings=96)
    table = {"model": str(directory), "address": free_address(), "backend": "vllm", "max_tokens": 64}
    (tmp_path / "run").mkdir()
    config = write_config(tmp_path / "run.toml", {
        "run": {"dir": str(tmp_path / "run")}, "model": {"path": "m"}, "queue": {"filter_range": []},
        "reward": {"type": "model", "model": "judge"}, "scorer": {"judge": table},
    })  # fmt: skip
    plain_table = ScorerConfig.model_validate(table | {"backend": "transformers"})
    with roles(tmp_path / "logs") as start, closing(ScorerClient("judge", table["address"])) as client:
        scorer = start("scorer", "scorer", str(config))
        plain = RewardModel(directory, plain_table, device=torch.device("cpu"), dtype=torch.float32)
        answers = plain.answer([Received(TextQuestion(0, MESSAGES, text), ()) for text in TEXTS])
        wanted = np.array([answer[0][0] for answer in answers])
        assert wanted.min() < -0.5  # no sigmoid or softmax gives that
        assert wanted.max() > 1.5
        wait_until("the scorer", lambda: serving(scorer), deadline_s=300)
        np.testing.assert_allclose(scores(client, TEXTS), wanted, rtol=1e-5, atol=1e-5)
        with pytest.raises(RewardError, match="has 97 tokens, and the reward model's context only 96"):
            client.score(MESSAGES, "=" * 94).result(30)
        assert (tmp_path / "run" / "scorers" / "judge").read_text().strip() == plain.digest
        assert descendants(scorer.process.pid) == set()  # the engine is in the scorer's process, and dies with it
        scorer.kill()
        scorer.wait()
