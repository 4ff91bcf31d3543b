"""A tiny model of bytes with Qwen3's chat template and special tokens, which knows two conversations by heart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.data.public_templates import tokenizer_of
from tests.extensions.agents.test_conversations import ASKED, CALL, RESULT, TOOLS

LONGEST = 2048
SAID = "It is 5."
_NUM_STEPS = 100


def byte_tokenizer() -> Any:
    return tokenizer_of("qwen3")


def model_of(vocab_size: int, end: int, *, longest: int = LONGEST, seed: int = 0) -> Qwen3ForCausalLM:
    """Random weights, float32. Its heads have 32 dimensions, which vLLM's CPU kernels take."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=longest, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=end, pad_token_id=None, initializer_range=0.05,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    config.architectures = ["Qwen3ForCausalLM"]  # as in every model that save_pretrained wrote
    return Qwen3ForCausalLM(config).float().eval()


def byte_model(seed: int = 0) -> Qwen3ForCausalLM:
    tokenizer = byte_tokenizer()
    return model_of(len(tokenizer), tokenizer.eos_token_id, seed=seed)


def memorise(model: Qwen3ForCausalLM) -> float:
    """Train the model to call the tool ``add`` when asked, and to say its result. Return the last loss, in nats.

    Other prompts than ``ASKED`` get answers that nothing determines.
    """
    tokenizer = byte_tokenizer()
    ids = tokenizer.apply_chat_template([ASKED], tools=TOOLS, add_generation_prompt=True, return_dict=False)
    labels = [-100] * len(ids)
    between = f"\n<|im_start|>user\n<tool_response>\n{RESULT['content']}\n</tool_response><|im_end|>\n"
    for text, is_said in ((f"{CALL}<|im_end|>", True), (f"{between}<|im_start|>assistant\n", False), (SAID, True)):
        new = tokenizer.encode(text + ("<|im_end|>" if text == SAID else ""), add_special_tokens=False)
        ids, labels = [*ids, *new], [*labels, *(new if is_said else [-100] * len(new))]
    return learn(model, [(ids, labels)])


def learn(model: Qwen3ForCausalLM, sequences: Sequence[tuple[list[int], list[int]]]) -> float:
    """Train on token ids with labels, one after the other. Return the last loss, in nats."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.tensor(0.0)
    for number in range(_NUM_STEPS):
        ids, labels = sequences[number % len(sequences)]
        loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def write_files(directory: Path, model: Qwen3ForCausalLM) -> Path:
    """Write what a generator gets of a model: its config and tokenizer, and no weights."""
    model.config.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory
