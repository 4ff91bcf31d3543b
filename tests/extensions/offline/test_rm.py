"""Reward models from pairs: the loss by hand, what is scored, what they learn, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

from async_rl.data.chat import load_tokenizer, render_answer
from async_rl.errors import DataError
from async_rl.extensions.offline.rm import bradley_terry_loss, pair_metrics
from async_rl.extensions.offline.tasks import train
from async_rl.records import TEXT_ROLE
from tests.extensions.offline.offline_run import metrics, offline_config
from tests.extensions.offline.read import scored_pairs
from tests.extensions.offline.test_sft_rows import rows_file


def pair_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """The better answer has more of the letter a."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        few, many = (int(x) for x in sorted(generator.choice(7, 2, replace=False)))
        texts = ["".join(generator.permutation(list("a" * n + "b" * (6 - n)))) for n in (many, few)]
        prompt = [{"role": "user", "content": str(generator.integers(10))}]
        rows.append({"prompt": prompt, "chosen": texts[0], "rejected": texts[1]})
    return rows


def test_the_loss_is_minus_the_log_sigmoid_of_the_difference_less_the_margin():
    # Differences less margins: 2 - 0 - 0 = 2, and 1 - 2 - 1 = -2. The mean of log(1 + e^-2) and log(1 + e^2).
    chosen = torch.tensor([2.0, 1.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.0, 2.0], dtype=torch.float64, requires_grad=True)
    margins = torch.tensor([0.0, 1.0], dtype=torch.float64)
    loss = bradley_terry_loss(chosen, rejected, margins)
    low, high = math.log1p(math.exp(-2)), math.log1p(math.exp(2))
    assert loss.item() == pytest.approx((low + high) / 2, abs=1e-12)
    # The slope by a chosen score is -(1 - sigmoid(x)) / 2; sigmoid(-2) = 0.1192.
    loss.backward()
    share = 1 / (1 + math.exp(2))
    torch.testing.assert_close(chosen.grad, torch.tensor([-share, share - 1], dtype=torch.float64) / 2)
    torch.testing.assert_close(rejected.grad, -chosen.grad if chosen.grad is not None else None)
    found = pair_metrics(chosen, rejected, margins)
    assert found["accuracy"] == 0.5
    assert (found["margin"], found["chosen"], found["rejected"]) == (0.5, 1.5, 1.0)
    assert pair_metrics(torch.ones(4), torch.ones(4), torch.zeros(4))["accuracy"] == 0.5, "a tie counts half"


def test_text_is_scored_at_its_end_token_as_the_scorer_reads_it(tmp_path: Path, tokenizer: Tokenizer):
    rows = [
        {"prompt": "ab", "chosen": "c", "rejected": "de", "margin": 0.5},
        {"prompt": "ab", "chosen": "c", "rejected": "de", "margin": "0.25"},  # CSV has text
        {"prompt": "ab", "chosen": "c", "rejected": "de"},
        {"prompt": "a" * 50, "chosen": "b", "rejected": "c"},  # too long, so left out
    ]
    pairs = scored_pairs(rows_file(tmp_path, *rows), tokenizer, max_length=20)
    assert [pair.margin for pair in pairs] == [0.5, 0.25, 0.0]
    for side, text in ((pairs[0].chosen, "abc"), (pairs[0].rejected, "abde")):
        assert "".join(tokenizer.convert_ids_to_tokens(side.token_ids[:-1].tolist())) == f"{text}<|end|>"
        # The trained token is a copy: its value is that of the one before it.
        assert side.loss_mask.tolist() == [False] * (len(text) + 1) + [True]
    asked = [{"role": TEXT_ROLE, "content": "ab"}]
    assert render_answer(tokenizer, asked, "c").tolist() == pairs[0].chosen.token_ids[:-1].tolist()


def test_a_margin_that_is_none_and_pairs_that_are_all_too_long_are_refused(tmp_path: Path, tokenizer: Tokenizer):
    for changed, message in (
        ({"margin": "x"}, ":1: margin: expected a finite number"),
        ({"prompt": "a" * 99}, "expected a pair of at most rm.max_length = 20"),
    ):
        row = {"prompt": "a", "chosen": "b", "rejected": "c", **changed}
        with pytest.raises(DataError, match=message):
            scored_pairs(rows_file(tmp_path, row), tokenizer, max_length=20)


def test_training_begins_at_log_2_puts_pairs_in_order_and_writes_a_classifier(tmp_path: Path):
    from transformers import AutoModelForSequenceClassification

    held_out = pair_rows(32, seed=1)
    for name, pairs in (("many", pair_rows(64)), ("held_out", held_out)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    section = {
        "data": str(tmp_path / "many.jsonl"), "eval": {"held_out": str(tmp_path / "held_out.jsonl")}, "steps": 60,
        "eval_every": 30, "checkpoint_every": 0, "batch_size": 8, "schedule": "constant",
    }  # fmt: skip
    train("rm", offline_config(tmp_path, "rm", rm=section, learner={"max_tokens": 40}))
    rows = metrics(tmp_path, "rm")
    assert rows[0]["loss"] == pytest.approx(math.log(2))  # the head is 0
    assert rows[0]["accuracy"] == 0.5
    assert [row["step"] for row in rows if "eval/held_out/accuracy" in row] == [30, 60]
    assert rows[-1]["eval/held_out/accuracy"] > 0.9
    # transformers' own scores, in a batch with padding, put the held-out pairs in order too.
    tokenizer = load_tokenizer(tmp_path / "out")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    right = 0
    for row in held_out:
        ids = [render_answer(tokenizer, row["prompt"], row[side]) for side in ("chosen", "rejected")]
        batch = tokenizer.pad({"input_ids": [one.tolist() for one in ids]}, return_tensors="pt")
        with torch.no_grad():
            better, worse = model(**batch).logits[:, 0].tolist()
        right += better > worse
    assert right / len(held_out) == pytest.approx(rows[-1]["eval/held_out/accuracy"], abs=1e-9)
