"""Reward models from pairs to a directory: the loss by hand, what they learn, how they resume, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from async_rl.config.config import Config
from async_rl.config.loading import config_to_toml
from async_rl.data.chat import load_tokenizer, render_answer
from async_rl.errors import DataError, RunError
from async_rl.extensions.offline import run
from async_rl.extensions.offline.rm import RewardModel, bradley_terry_loss, pair_metrics
from async_rl.extensions.offline.tasks import train
from async_rl.records import TEXT_ROLE
from tests.end_to_end.harness import wait_until
from tests.extensions.offline.read import scored_pairs
from tests.learner.ranks import finish_ranks, run_ranks, start_ranks
from tests.learner.tiny import tiny_config, tiny_model


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


def rm_config(root: Path, *, lora: bool = False, parallel: dict[str, int] | None = None, **settings: Any) -> Config:
    """64 pairs; 12 steps of 8 pairs, a checkpoint every 5."""
    if not (root / "model").exists():
        tiny_model(root / "model", num_key_value_heads=2)
        for name, rows in (("rows", pair_rows(64)), ("held_out", pair_rows(32, seed=1))):
            (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {
        "data": str(root / "rows.jsonl"), "out": str(root / "out"), "steps": 12, "batch_size": 8, "lr": 1e-2,
        "schedule": "constant", "checkpoint_every": 5, "eval": {"held_out": str(root / "held_out.jsonl")}, **settings,
    }  # fmt: skip
    more = {"lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}} if lora else {}
    # Pairs lie in different micro-batches.
    learner = {"max_tokens": 40 // (parallel or {}).get("sequence", 1)}
    return tiny_config(
        root, "model", rm=section, checkpoint={"keep_last": 1}, learner=learner, parallel=parallel or {}, **more
    )


def metrics(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "run" / "rm" / "metrics.jsonl").read_text().splitlines()]


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


def test_text_is_scored_at_its_end_token_as_the_scorer_reads_it(tmp_path: Path):
    tokenizer = load_tokenizer(tiny_model(tmp_path / "model"))
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "ab", "chosen": "c", "rejected": "de"}) + "\n")
    (pair,) = scored_pairs(path, tokenizer, max_length=50)
    for side, text in ((pair.chosen, "abc"), (pair.rejected, "abde")):
        assert "".join(tokenizer.convert_ids_to_tokens(side.token_ids[:-1].tolist())) == f"{text}<|end|>"
        # The trained token is a copy: its value is that of the one before it.
        assert side.loss_mask.tolist() == [False] * (len(text) + 1) + [True]
    asked = [{"role": TEXT_ROLE, "content": "ab"}]
    assert render_answer(tokenizer, asked, "c").tolist() == pair.chosen.token_ids[:-1].tolist()


def test_a_tie_counts_half():
    ones = torch.ones(4)
    assert pair_metrics(ones, ones, torch.zeros(4))["accuracy"] == 0.5


def test_training_begins_at_log_2_puts_pairs_in_order_and_writes_a_classifier(tmp_path: Path):
    from transformers import AutoModelForSequenceClassification

    train("rm", rm_config(tmp_path, steps=60, eval_every=30))
    rows = metrics(tmp_path)
    assert rows[0]["loss"] == pytest.approx(math.log(2))  # the head is 0
    assert rows[0]["accuracy"] == 0.5
    assert [row["step"] for row in rows if "eval/held_out/accuracy" in row] == [30, 60]
    assert rows[-1]["eval/held_out/accuracy"] > 0.9
    # transformers' own scores, in a batch with padding, put the held-out pairs in order too.
    tokenizer = load_tokenizer(tmp_path / "out")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    held_out = pair_rows(32, seed=1)
    right = 0
    for row in held_out:
        ids = [render_answer(tokenizer, row["prompt"], row[side]) for side in ("chosen", "rejected")]
        batch = tokenizer.pad({"input_ids": [one.tolist() for one in ids]}, return_tensors="pt")
        with torch.no_grad():
            better, worse = model(**batch).logits[:, 0].tolist()
        right += better > worse
    assert right / len(held_out) == pytest.approx(rows[-1]["eval/held_out/accuracy"], abs=1e-9)


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_that_dies_and_resumes_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
):
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    train("rm", rm_config(tmp_path / "whole", lora=lora))
    real_batch_of = run.batch_of

    def dies_in_step_8(rows: Any, step: int, **settings: Any) -> Any:
        if step == 7:
            raise KeyboardInterrupt
        return real_batch_of(rows, step, **settings)

    monkeypatch.setattr(run, "batch_of", dies_in_step_8)
    with pytest.raises(KeyboardInterrupt):
        train("rm", rm_config(tmp_path / "broken", lora=lora))
    monkeypatch.setattr(run, "batch_of", real_batch_of)
    train("rm", rm_config(tmp_path / "broken", lora=lora, eval_every=4))  # a resumed run may measure more often
    assert [row["loss"] for row in metrics(tmp_path / "broken")] == [row["loss"] for row in metrics(tmp_path / "whole")]
    expected = weights(tmp_path / "whole")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path / "broken").items())


def test_a_resumed_run_refuses_other_margins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = rm_config(tmp_path, steps=1)
    monkeypatch.setattr(RewardModel, "export", Mock(side_effect=RuntimeError("killed")))
    with pytest.raises(RuntimeError, match="killed"):
        train("rm", config)
    path = tmp_path / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "margin": 0.5}) + "\n" for row in rows))
    with pytest.raises(RunError, match=r"rm\.data: expected the rows that .* was trained on, got others"):
        train("rm", config)


def weights(root: Path) -> dict[str, torch.Tensor]:
    return load_file(root / "out" / "model.safetensors")


def start(root: Path, **settings: Any) -> None:
    """Write what the scenario ``reward_model`` reads."""
    root.mkdir()
    (root / "faults").mkdir()
    (root / "rm.toml").write_text(config_to_toml(rm_config(root, **settings)))


def assert_learned_the_same(root: Path, expected: Path) -> None:
    for key in ("loss", "accuracy", "margin"):
        found = [row[key] for row in metrics(root)]
        np.testing.assert_allclose(found, [row[key] for row in metrics(expected)], atol=1e-4, err_msg=key)
    for name, tensor in weights(root).items():
        torch.testing.assert_close(tensor, weights(expected)[name], atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_two_ranks_that_share_sequences_learn_with_adapters_what_one_learns(tmp_path: Path):
    (tmp_path / "one").mkdir()
    train("rm", rm_config(tmp_path / "one", lora=True, steps=4))
    start(tmp_path / "two", lora=True, steps=4, parallel={"sequence": 2})
    run_ranks("reward_model", tmp_path / "two")
    assert_learned_the_same(tmp_path / "two", tmp_path / "one")


@pytest.mark.long
@pytest.mark.parametrize("parallel", [{}, {"sequence": 2}, {"pipeline": 2}, {"tensor": 2}])
@pytest.mark.parametrize("lora", [False, True])
def test_two_ranks_learn_what_one_learns_under_every_layout(tmp_path: Path, parallel: dict[str, int], lora: bool):
    (tmp_path / "one").mkdir()
    train("rm", rm_config(tmp_path / "one", lora=lora, steps=4))
    start(tmp_path / "two", lora=lora, steps=4, parallel=parallel)
    run_ranks("reward_model", tmp_path / "two")
    assert_learned_the_same(tmp_path / "two", tmp_path / "one")


POINTS = (
    "learner.forward", "learner.forward-rank-1", "learner.backward", "learner.backward-rank-1",
    "learner.checkpoint_writing", "learner.checkpoint_saved", "learner.checkpoint_written",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("parallel", [{}, {"sequence": 2}])
def test_two_ranks_killed_at_every_point_end_with_the_weights_of_an_undisturbed_run(
    tmp_path: Path, parallel: dict[str, int]
):
    start(tmp_path / "whole", parallel=parallel)
    run_ranks("reward_model", tmp_path / "whole")
    start(tmp_path / "killed", parallel=parallel, checkpoint_every=2)
    faults = tmp_path / "killed" / "faults"
    for point in POINTS:
        (faults / point).touch()
        ranks = start_ranks("reward_model", tmp_path / "killed")
        wait_until(f"a process at {point}", lambda point=point: any(faults.glob(f"{point}.*")))
        for rank in ranks:
            rank.kill()
        finish_ranks(ranks)
    run_ranks("reward_model", tmp_path / "killed")
    assert [row["loss"] for row in metrics(tmp_path / "killed")] == [row["loss"] for row in metrics(tmp_path / "whole")]
    expected = weights(tmp_path / "whole")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path / "killed").items())


def test_all_forms_of_a_pair_give_the_same_tokens(tmp_path: Path):
    tokenizer = load_tokenizer(tiny_model(tmp_path / "model"))
    user, (good, bad) = {"role": "user", "content": "a"}, ({"role": "assistant", "content": c} for c in "bc")
    rows = [
        {"prompt": [user], "chosen": "b", "rejected": "c", "margin": 0.5},
        {"prompt": [user], "chosen": [good], "rejected": [bad]},
        {"chosen": [user, good], "rejected": [user, bad]},
        {"prompt": [user], "chosen": [user, good], "rejected": [user, bad]},
        {"prompt": "a", "chosen": [user, good], "rejected": [user, bad], "margin": "0.25"},  # CSV has text
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a" * 50, "chosen": "b", "rejected": "c"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = scored_pairs(tmp_path / "rows.jsonl", tokenizer, max_length=20)
    assert len(pairs) == 6  # the last is too long
    for side in ("chosen", "rejected"):
        ids = [getattr(pair, side).token_ids.tolist() for pair in pairs]
        assert all(one == ids[0] for one in ids[:5])
        letter = "b" if side == "chosen" else "c"
        expected = tokenizer(f"<|user|>a<|end|>\n<|assistant|>{letter}<|end|>\n", add_special_tokens=False)["input_ids"]
        assert ids[0][:-1] == expected
        assert ids[5][:-1] == tokenizer(f"a{letter}<|end|>")["input_ids"]
    assert [pair.margin for pair in pairs] == [0.5, 0.0, 0.0, 0.0, 0.25, 0.0]
    # Only the appended token is trained: its value is that of the last token before it.
    assert [int(mask) for mask in pairs[5].chosen.loss_mask] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "got prompt: the text 'a', chosen: the text 'b'; correct"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, "margin: expected a finite number"),
        (
            {"chosen": [{"role": "user", "content": "a"}], "rejected": []},
            "got chosen: a list of 1, rejected: a list of 0; correct",
        ),
        (
            {"prompt": [], "chosen": [{"role": "user", "content": "a"}], "rejected": "b"},
            "got prompt: a list of 0, chosen",
        ),
        ({"prompt": [{"role": "user"}], "chosen": "b", "rejected": "c"}, 'messages with "role" and "content"'),
        ({"prompt": "a" * 99, "chosen": "b", "rejected": "c"}, "expected a pair of at most rm.max_length = 20"),
    ],
)
def test_bad_pairs_are_refused_with_their_place(tmp_path: Path, row: dict[str, Any], message: str):
    tokenizer = load_tokenizer(tiny_model(tmp_path / "model"))
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=message):
        scored_pairs(tmp_path / "rows.jsonl", tokenizer, max_length=20)
