"""A teacher's log-probabilities are those of transformers, whatever the batch; what it can't score it says."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from async_rl.config.scorer import ScorerConfig
from async_rl.errors import ModelError
from async_rl.launch.checks.models import check_teacher
from async_rl.scorer.client.messages import Received, TextQuestion, TokensQuestion
from async_rl.scorer.teacher import Teacher
from tests.generator.tiny_model import CHARACTERS, write_model, write_tokenizer
from tests.scorer.test_reward_model import write_reward_model


def question(ids: list[int], first: int, *, top_k: int = 0, temperature: float = 1.0) -> Received:
    """Tokens from ``first`` on are sampled."""
    mask = np.arange(len(ids)) >= first
    return Received(TokensQuestion(0, temperature, top_k), (np.array(ids, np.int32), mask))


def loaded(directory: Path, max_tokens: int = 20) -> Teacher:
    config = ScorerConfig(model=str(directory), address="tcp://127.0.0.1:1", max_tokens=max_tokens)
    return Teacher(directory, config, device=torch.device("cpu"), dtype=torch.float32)


def of_transformers(model: PreTrainedModel, received: Received) -> torch.Tensor:
    """The log-probabilities at each sampled token of the sequence alone, [S, V]."""
    ids, mask = received.arrays
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(ids.tolist())[None]).logits[0]
    return (logits / received.message.temperature).log_softmax(-1)[np.flatnonzero(mask) - 1]


def test_the_scores_of_a_batch_are_those_of_transformers_for_each_sequence_alone(tmp_path: Path):
    model = write_model(tmp_path)
    asked = [
        question([5, 6, 7, 8, 9], 2, top_k=3),
        question([5, 6, 10, 11], 2, top_k=3, temperature=0.5),
        question(list(range(3, 40)), 30),  # longer than a batch
        question([7, 8, 9], 3, top_k=3),  # nothing is sampled
    ]
    teacher = loaded(tmp_path)
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
        (question([3] * 600, 1), "has 600 tokens, and the teacher's context only 512"),
        (question([3, 99], 1), "within the teacher's 46 logits, got 3 to 99"),
        (question([3, 4], 1, top_k=47), "within the teacher's 46 logits"),
        (Received(TextQuestion(0, [], "a"), ()), "this scorer is a teacher, got a text"),
    ],
)
def test_what_a_teacher_cant_score_is_an_error_of_that_question_alone(tmp_path: Path, received: Received, message: str):
    write_model(tmp_path)
    wrong, fine = loaded(tmp_path).answer([received, question([3, 4], 1)])
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
    for check in (lambda: check_teacher(model, str(tmp_path / "student")), lambda: loaded(model)):
        with pytest.raises(ModelError, match=r"expected a causal LM in .*judge, got Qwen2ForSequenceClassification"):
            check()
