"""A scorer's models: a reward model gives each text the score of its last token, a teacher log-probabilities.

Both do so whatever the batch. What a scorer with vLLM refuses before vLLM starts is here, too; its scores are in
tests/vllm/test_scorer.py.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from async_rl.config.loading import parse_config
from async_rl.config.scorer import ScorerConfig
from async_rl.errors import ConfigError, ModelError
from async_rl.launch.checks.models import check_teacher
from async_rl.run.directory import RunDir
from async_rl.scorer import reward_model
from async_rl.scorer.client.messages import Received, TextQuestion, TokensQuestion
from async_rl.scorer.reward_model import RewardModel
from async_rl.scorer.start import check_digest, run_scorer
from async_rl.scorer.teacher import Teacher
from async_rl.scorer.transformers_engine import batches
from async_rl.scorer.vllm_engine import check_model
from tests.end_to_end.harness import write_config
from tests.generator.tiny_model import CHARACTERS, write_model, write_tokenizer
from tests.learner.tiny import add_token
from tests.refusal import refusal

MESSAGES = [{"role": "user", "content": "1+1"}]


def write_reward_model(directory: Path, *, num_labels: int = 1, seed: int = 0, **shape: int) -> Path:
    torch.manual_seed(seed)
    any_config: Any = transformers.Qwen2Config  # its stubs lack num_labels
    given = {"hidden_size": 16, "max_position_embeddings": 32} | shape
    config = any_config(
        vocab_size=len(CHARACTERS) + 3, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_labels=num_labels, initializer_range=0.5, **given,
    )  # fmt: skip
    transformers.Qwen2ForSequenceClassification(config).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def loaded(directory: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> RewardModel:
    config = ScorerConfig(model=str(directory), address="tcp://127.0.0.1:1", max_tokens=64, **settings)
    return RewardModel(directory, config, device=torch.device("cpu"), dtype=dtype)


def asked(model: RewardModel, *texts: str) -> list[Any]:
    return model.answer([Received(TextQuestion(0, MESSAGES, text), ()) for text in texts])


def test_a_score_is_that_of_transformers_for_prompt_and_answer_alone(tmp_path: Path):
    model = loaded(write_reward_model(tmp_path))
    texts = ["=2", "a longer answer", "", "=3"]
    scores = [float(answer[0][0]) for answer in asked(model, *texts)]
    plain: Any = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for text, score in zip(texts, scores, strict=True):
        # The template of the tiny tokenizer joins the contents; characters have ids from 3 on.
        ids = torch.tensor([[CHARACTERS.index(c) + 3 for c in "1+1" + text]])
        assert score == pytest.approx(plain(input_ids=ids).logits[0, 0].item(), abs=1e-5)
    assert len(set(scores)) == 4
    ((half,),) = asked(loaded(tmp_path, torch.bfloat16), "=2")
    assert half == pytest.approx(scores[0], abs=0.1)


def test_caps_of_attention_count(tmp_path: Path):
    # transformers' default attention leaves them out; its eager attention has them.
    torch.manual_seed(0)
    any_config: Any = transformers.Gemma2Config
    config = any_config(
        vocab_size=len(CHARACTERS) + 3, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_labels=1, initializer_range=0.5,
        attn_logit_softcapping=0.5,
    )  # fmt: skip
    transformers.Gemma2ForSequenceClassification(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    ((score,),) = asked(loaded(tmp_path), "=2")
    eager: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, attn_implementation="eager"
    ).eval()
    ids = torch.tensor([[CHARACTERS.index(c) + 3 for c in "1+1=2"]])
    assert float(score[0]) == pytest.approx(eager(input_ids=ids).logits[0, 0].item(), abs=1e-5)


def test_batches_hold_similar_lengths_up_to_the_limit_or_one_text():
    # Sorted: 1 (2), 3 (3), 0 (5), 2 (9). 2 x 3 = 6 fits into 8, 3 x 5 does not; 9 is alone.
    assert list(batches([5, 2, 9, 3], 8)) == [[1, 3], [0], [2]]


def test_a_text_beyond_the_context_or_with_a_token_that_has_no_row_is_refused_and_others_are_scored(tmp_path: Path):
    add_token(write_reward_model(tmp_path), "<new>")
    # With three tokens of prompt, of 32.
    fits, too_long, unknown = asked(loaded(tmp_path), "a" * 29, "a" * 30, "1<new>")
    assert len(fits[0]) == 1
    assert "has 33 tokens, and the reward model's context only 32" in too_long
    assert "expected tokens that the model's embedding of 46 rows has a row for" in unknown


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


def sampled(ids: list[int], first: int, *, top_k: int = 0, temperature: float = 1.0) -> Received:
    """Tokens from ``first`` on are sampled."""
    mask = np.arange(len(ids)) >= first
    return Received(TokensQuestion(0, temperature, top_k), (np.array(ids, np.int32), mask))


def teacher_of(directory: Path) -> Teacher:
    config = ScorerConfig(model=str(directory), address="tcp://127.0.0.1:1", max_tokens=20)
    return Teacher(directory, config, device=torch.device("cpu"), dtype=torch.float32)


def of_transformers(model: transformers.PreTrainedModel, received: Received) -> torch.Tensor:
    """The log-probabilities at each sampled token of the sequence alone, [S, V]."""
    ids, mask = received.arrays
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(ids.tolist())[None]).logits[0]
    return (logits / received.message.temperature).log_softmax(-1)[np.flatnonzero(mask) - 1]


def test_the_scores_of_a_batch_are_those_of_transformers_for_each_sequence_alone(tmp_path: Path):
    model = write_model(tmp_path)
    asked = [
        sampled([5, 6, 7, 8, 9], 2, top_k=3),
        sampled([5, 6, 10, 11], 2, top_k=3, temperature=0.5),
        sampled(list(range(3, 40)), 30),  # longer than a batch
        sampled([7, 8, 9], 3, top_k=3),  # nothing is sampled
    ]
    teacher = teacher_of(tmp_path)
    for received, answer in zip(asked, teacher.answer(asked), strict=True):
        assert isinstance(answer, tuple)
        logprobs, ids = answer
        ids_T, mask = received.arrays
        want = of_transformers(model, received)
        top_k = received.message.top_k
        assert logprobs.shape == (mask.sum(), 1 + top_k)
        np.testing.assert_allclose(logprobs[:, 0], want[range(len(want)), ids_T[mask]], atol=1e-5)
        np.testing.assert_allclose(logprobs[:, 1:], want.topk(top_k).values, atol=1e-5)
        np.testing.assert_array_equal(ids, want.topk(top_k).indices)


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (sampled([3] * 600, 1), "has 600 tokens, and the teacher's context only 512"),
        (sampled([3, 99], 1), "within the teacher's 46 logits, got 3 to 99"),
        (sampled([3, 4], 1, top_k=47), "within the teacher's 46 logits"),
        (Received(TextQuestion(0, [], "a"), ()), "this scorer is a teacher, got a text"),
    ],
)
def test_what_a_teacher_cant_score_is_an_error_of_that_question_alone(tmp_path: Path, received: Received, message: str):
    write_model(tmp_path)
    wrong, fine = teacher_of(tmp_path).answer([received, sampled([3, 4], 1)])
    assert message in wrong
    assert isinstance(fine, tuple)


def test_a_teacher_with_another_vocabulary_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    student, same, other = (tmp_path / name for name in ("student", "same", "other"))
    write_tokenizer(student)
    write_model(same)
    check_teacher(same, str(student))
    monkeypatch.setattr("tests.generator.tiny_model.CHARACTERS", CHARACTERS[::-1])
    write_model(other)
    with pytest.raises(ModelError, match=r"the vocabulary of model\.path"):
        check_teacher(other, str(student))


def test_a_reward_model_is_no_teacher(tmp_path: Path):
    write_tokenizer(tmp_path / "student")
    model = write_reward_model(tmp_path / "judge", tie_word_embeddings=True)
    for check in (lambda: check_teacher(model, str(tmp_path / "student")), lambda: teacher_of(model)):
        with pytest.raises(ModelError, match=r"expected a causal LM in .*judge, got Qwen2ForSequenceClassification"):
            check()


def raw_config(scorers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A config whose scorers are the reward model ``a`` and the teacher ``b``, if they are named."""
    uses: dict[str, Any] = {"reward": {"type": "model", "model": "a"}, "queue": {"filter_range": []}} if scorers else {}
    uses |= {"distill": {"teacher": "b", "rewards": True}} if "b" in scorers else {}
    tables = {name: {"model": "m", "address": f"tcp://127.0.0.1:{ord(name)}", **own} for name, own in scorers.items()}
    return {"run": {"dir": "r"}, "model": {"path": "m"}, "scorer": tables, **uses}


@pytest.mark.parametrize(
    ("names", "given", "message"),
    [
        ("", None, r"expected a table \[scorer\.NAME\]"),
        ("a", "c", r"\(a\), got 'c'"),
        ("ab", None, r"one of the config's scorers \(a, b\), got none"),
    ],
)
def test_a_scorer_that_can_t_be_chosen_is_refused_with_a_remedy(names: str, given: str, message: str):
    with pytest.raises(ConfigError, match=message):
        run_scorer(parse_config(raw_config({name: {} for name in names}), "test"), given, insecure=False)


def test_without_vllm_the_command_says_how_to_install_it_and_exits_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # vLLM's variables stay here
    config = write_config(tmp_path / "run.toml", raw_config({"a": {"backend": "vllm"}}))
    message = refusal(capsys, "scorer", str(config))
    assert 'scorer.a.backend = "vllm" needs vllm' in message
    assert "pip install vllm==0.32.0" in message


def test_a_model_that_pools_in_its_own_way_is_refused(tmp_path: Path):
    any_config: Any = transformers.BertConfig  # its stubs lack num_labels
    config = any_config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_labels=1
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"got a BertForSequenceClassification, .* set backend = .transformers"):
        check_model(tmp_path, torch.float32)


def test_a_model_of_several_labels_or_without_all_weights_is_refused_because_vllm_would_run_it(tmp_path: Path):
    with pytest.raises(ModelError, match=r"one label .* got 2 labels"):
        check_model(write_reward_model(tmp_path / "two", num_labels=2), torch.float32)
    path, name = write_reward_model(tmp_path) / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    check_model(tmp_path, torch.float32)
    weights = load_file(path)
    del weights[name]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"got no {name}"):
        check_model(tmp_path, torch.float32)


class ShortEngine:
    """Scores texts of at most 6 tokens by their lengths."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def why_too_long(self, num_tokens: int) -> str:
        return f"{num_tokens} tokens are too many" if num_tokens > 6 else ""

    def score(self, texts: Sequence[np.ndarray]) -> list[float]:
        return [float(len(text)) for text in texts]


def test_a_text_that_the_engine_cant_hold_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reward_model, "VllmEngine", ShortEngine)
    # The prompt has three tokens.
    too_long, fits = asked(loaded(write_reward_model(tmp_path), backend="vllm"), "1234", "123")
    assert too_long == "7 tokens are too many"
    assert fits[0] == [6.0]
