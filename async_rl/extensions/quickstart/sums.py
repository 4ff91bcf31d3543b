"""The quickstart's task: two-digit sums, worked digit by digit, for a character-level model made on the spot.

``write_task`` writes three disjoint sets of pairs in the documented formats: SFT rows, RL rows and held-out rows. The
SFT rows come from a careless pupil who forgets two carries in three: the warm-started model knows the form and most
digits, and is right on about three held-out sums in ten. Reinforcement learning has to find out that carrying pays.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

CARRY_SHARE = 0.7
"""Share of sums with a carry from the units, in every set."""
FORGOTTEN_CARRIES = 2 / 3
NUM_HELD_OUT = 512
NUM_RL = 3000
CHARACTERS = "0123456789+=:;\\{}boxed "

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)


def working(a: int, b: int, *, carry: bool) -> str:
    """How the pupil works out ``a + b``: units, then tens, then the boxed result (wrong if a due carry is left out)."""
    units = a % 10 + b % 10
    tens = a // 10 + b // 10 + carry
    tens_text = f"{a // 10}+{b // 10}{'+1' if carry else ''}={tens}"
    return f"{a % 10}+{b % 10}={units};{tens_text};\\boxed{{{tens}{units % 10}}}"


def split_pairs(seed: int) -> dict[str, list[tuple[int, int]]]:
    """Pairs of two-digit numbers, dealt out to ``held_out``, ``rl`` and ``sft``: disjoint, each with its carries."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    with_carry = [p for p in pairs if p[0] % 10 + p[1] % 10 >= 10]
    without = [p for p in pairs if p[0] % 10 + p[1] % 10 < 10]
    sets: dict[str, list[tuple[int, int]]] = {}
    for name, size in (("held_out", NUM_HELD_OUT), ("rl", NUM_RL), ("sft", 10**6)):
        carries = min(round(size * CARRY_SHARE), len(with_carry))
        plain = min(size - carries, round(carries * (1 - CARRY_SHARE) / CARRY_SHARE))
        sets[name] = with_carry[:carries] + without[:plain]
        with_carry, without = with_carry[carries:], without[plain:]
        rng.shuffle(sets[name])
    return sets


def write_task(directory: Path, *, seed: int) -> None:
    """``sft.jsonl`` (prompt, response), ``train.jsonl`` and ``held_out.jsonl`` (messages, gt_answer)."""
    directory.mkdir(parents=True, exist_ok=True)
    sets = split_pairs(seed)
    rng = random.Random(seed + 1)
    sft: list[dict[str, Any]] = []
    for a, b in sets["sft"]:
        for _ in range(2):
            carry = a % 10 + b % 10 >= 10 and rng.random() >= FORGOTTEN_CARRIES
            sft.append({"prompt": f"{a}+{b}:", "response": working(a, b, carry=carry)})
    rng.shuffle(sft)
    _write(directory / "sft.jsonl", sft)
    for name, file in (("rl", "train.jsonl"), ("held_out", "held_out.jsonl")):
        rows = [
            {"messages": [{"role": "user", "content": f"{a}+{b}:"}], "gt_answer": str(a + b)} for a, b in sets[name]
        ]
        _write(directory / file, rows)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_model(directory: Path, *, seed: int, characters: str = CHARACTERS) -> None:
    """A small Qwen2 with random weights and a tokenizer of ``characters`` (and ``?``), as a Hugging Face directory."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *characters, "?"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="?", chat_template=_CHAT_TEMPLATE
    )
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=3,  # of 32 dimensions: vLLM's CPU kernels take no narrower ones
        num_key_value_heads=3,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary["<eos>"],
        pad_token_id=vocabulary["<pad>"],
    )
    logging.disable_progress_bar()  # of the one file that is written
    Qwen2ForCausalLM(config).save_pretrained(directory)
    fast.save_pretrained(directory)
