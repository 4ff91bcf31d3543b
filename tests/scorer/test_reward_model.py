"""A scorer's reward model gives each text the score of its last token, whatever the batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    Gemma2Config,
    Gemma2ForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from async_rl.config.loading import parse_config
from async_rl.config.scorer import ScorerConfig
from async_rl.errors import ConfigError, ModelError
from async_rl.run.directory import RunDir
from async_rl.scorer.client.messages import Received, TextQuestion
from async_rl.scorer.reward_model import RewardModel
from async_rl.scorer.start import check_digest, run_scorer
from async_rl.scorer.transformers_engine import batches
from tests.generator.tiny_model import CHARACTERS, write_tokenizer
from tests.learner.tiny import add_token

MESSAGES = [{"role": "user", "content": "1+1"}]


def write_reward_model(directory: Path, *, num_labels: int = 1, seed: int = 0, **shape: int) -> Path:
    torch.manual_seed(seed)
    any_config: Any = Qwen2Config  # its stubs lack num_labels
    given = {"hidden_size": 16, "max_position_embeddings": 32} | shape
    config = any_config(
        vocab_size=len(CHARACTERS) + 3, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_labels=num_labels, initializer_range=0.5, **given,
    )  # fmt: skip
    Qwen2ForSequenceClassification(config).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def loaded(directory: Path, max_tokens: int = 64) -> RewardModel:
    config = ScorerConfig(model=str(directory), address="tcp://127.0.0.1:1", max_tokens=max_tokens)
    return RewardModel(directory, config, device=torch.device("cpu"), dtype=torch.float32)


def asked(model: RewardModel, *texts: str) -> list[Any]:
    return model.answer([Received(TextQuestion(0, MESSAGES, text), ()) for text in texts])


def test_a_score_is_that_of_transformers_for_prompt_and_answer_alone(tmp_path: Path):
    model = loaded(write_reward_model(tmp_path))
    texts = ["=2", "a longer answer", "", "=3"]
    scores = [float(answer[0][0]) for answer in asked(model, *texts)]
    plain: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for text, score in zip(texts, scores, strict=True):
        # The template of the tiny tokenizer joins the contents; characters have ids from 3 on.
        ids = torch.tensor([[CHARACTERS.index(c) + 3 for c in "1+1" + text]])
        assert score == pytest.approx(plain(input_ids=ids).logits[0, 0].item(), abs=1e-5)
    assert len(set(scores)) == 4


def test_caps_of_attention_count(tmp_path: Path):
    # transformers' default attention leaves them out; its eager attention has them.
    torch.manual_seed(0)
    any_config: Any = Gemma2Config
    config = any_config(
        vocab_size=len(CHARACTERS) + 3, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_labels=1, initializer_range=0.5,
        attn_logit_softcapping=0.5,
    )  # fmt: skip
    Gemma2ForSequenceClassification(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    ((score,),) = asked(loaded(tmp_path), "=2")
    ids = torch.tensor([[CHARACTERS.index(c) + 3 for c in "1+1=2"]])
    plain = [
        AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation=attention)
        for attention in ("eager", "sdpa")
    ]
    eager, sdpa = (model.eval()(input_ids=ids).logits[0, 0].item() for model in plain)
    assert abs(eager - sdpa) > 1e-3
    assert float(score[0]) == pytest.approx(eager, abs=1e-5)


def test_batches_hold_similar_lengths_up_to_the_limit_or_one_text():
    # Sorted: 1 (2), 3 (3), 0 (5), 2 (9). 2 x 3 = 6 fits into 8, 3 x 5 does not; 9 is alone.
    assert list(batches([5, 2, 9, 3], 8)) == [[1, 3], [0], [2]]


def test_a_text_beyond_the_context_is_refused_and_not_cut(tmp_path: Path):
    model = loaded(write_reward_model(tmp_path))
    fits, too_long = asked(model, "a" * 29, "a" * 30)  # with three tokens of prompt, of 32
    assert isinstance(fits, tuple)
    assert "has 33 tokens, and the reward model's context only 32" in too_long


def test_a_text_with_a_token_that_the_model_has_no_row_for_is_refused_and_others_are_scored(tmp_path: Path):
    add_token(write_reward_model(tmp_path), "<new>")
    refused, scored = asked(loaded(tmp_path), "1<new>", "2")
    assert "a prompt with its answer: expected tokens that the model's embedding of 46 rows has a row for" in refused
    assert len(scored[0]) == 1


def test_a_classifier_of_several_labels_is_no_reward_model(tmp_path: Path):
    with pytest.raises(ModelError, match=r"one label .* got 2 labels"):
        loaded(write_reward_model(tmp_path, num_labels=2))


def test_the_digest_is_of_the_weights_and_the_run_keeps_its_first(tmp_path: Path):
    first, again, second = (
        loaded(write_reward_model(tmp_path / name, seed=seed)) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first.digest == again.digest != second.digest
    assert first.vocabulary == second.vocabulary
    run_dir = RunDir(tmp_path / "run")
    check_digest(run_dir, "rm", first.digest, None)  # there is no run directory here, so nothing is noted
    run_dir.path.mkdir()
    check_digest(run_dir, "rm", first.digest, None)
    check_digest(run_dir, "rm", again.digest, first.digest)
    for expected in (None, second.digest):
        with pytest.raises(ConfigError, match=r"scorer\.rm\.model: expected the model with the digest"):
            check_digest(run_dir, "rm", second.digest, expected)


def test_half_precision_is_possible(tmp_path: Path):
    directory = write_reward_model(tmp_path)
    config = ScorerConfig(model=str(directory), address="tcp://127.0.0.1:1")
    model = RewardModel(directory, config, device=torch.device("cpu"), dtype=torch.bfloat16)
    ((score,),) = asked(model, "=2")
    assert np.isfinite(score).all()


@pytest.mark.parametrize(
    ("names", "given", "message"),
    [
        ((), None, r"expected a table \[scorer\.NAME\] in the config, got none; add one"),
        (("a",), "c", r"expected the name of a scorer of the config \(a\), got 'c'; correct it"),
        (("a", "b"), None, r"expected the name of one of the config's scorers \(a, b\), got none; add it"),
    ],
)
def test_a_scorer_that_can_t_be_chosen_is_refused_with_a_remedy(names: tuple[str, ...], given: str, message: str):
    table = {"model": "m", "address": "tcp://127.0.0.1:1"}
    uses: dict[str, Any] = {"reward": {"type": "model", "model": "a"}, "queue": {"filter_range": []}} if names else {}
    uses |= {"distill": {"teacher": "b", "rewards": True}} if "b" in names else {}
    scorers = {name: table | {"address": f"tcp://127.0.0.1:{port}"} for port, name in enumerate(names, 1)}
    config = parse_config({"run": {"dir": "r"}, "model": {"path": "m"}, "scorer": scorers, **uses}, "test")
    with pytest.raises(ConfigError, match=message):
        run_scorer(config, given, insecure=False)
