"""Tokenizers that write a space before each text: an environment's next state gets none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from async_rl.generator.backend import Sampled
from async_rl.generator.environment_rollouts import TokenizerText, Trajectory
from tests.extensions.offline.test_leading_spaces import WAYS, tokenizer_of


@pytest.mark.parametrize("way", WAYS)
def test_a_second_state_has_the_tokens_that_it_has_as_a_first_one(way: str):
    tokenizer = tokenizer_of(way)
    text = TokenizerText(tokenizer)
    asked: list[Any] = [{"role": "user", "content": "Q"}]
    trajectory = Trajectory(text)
    first = trajectory.add_state(text.render(asked))
    ids = np.array(tokenizer.convert_tokens_to_ids(["▁A", "</s>"]), np.int32)
    zeros = np.zeros(len(ids), np.float32)
    trajectory.add_answer(Sampled("lease", 0, first, ids, zeros, zeros.astype(np.int32), "stop", " A"))
    state = text.render([*asked, {"role": "assistant", "content": "A"}, {"role": "user", "content": "Q"}])
    assert trajectory.add_state(state).tolist() == text.encode(state).tolist()
    assert len(trajectory.sequences()) == 1
