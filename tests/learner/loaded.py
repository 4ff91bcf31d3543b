"""A model large enough to see in a process's memory, and how much that memory has grown."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch

from tests.processes import anonymous_bytes

MB = 1_000_000
_LAYER: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
_LAYER_PARAMETERS = 4 * 1024**2 + 3 * 1024 * 4096


class PeakAnon:
    """The largest anonymous memory of this process, sampled by a thread from its start on.

    Attributes:
        start_bytes: at the start.
        peak_bytes: the largest so far.
    """

    def __init__(self, interval_s: float = 0.002) -> None:
        self.start_bytes = self.peak_bytes = anonymous_bytes(os.getpid())
        self._interval_s, self._stopping = interval_s, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def growth(self) -> int:
        """Stop and return the growth to the peak, bytes."""
        self._stopping.set()
        self._thread.join()
        return self.peak_bytes - self.start_bytes

    def _sample(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes(os.getpid()))


def write_model(directory: Path, num_bytes: int, *, vocabulary: int) -> tuple[int, int]:
    """Write a Qwen2 with random weights into bfloat16 files. Return the float32 bytes of all of it, and of its largest
    FSDP group.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    root = 2 * vocabulary * _LAYER["hidden_size"]
    num_layers = max(2, round((num_bytes / 4 - root) / _LAYER_PARAMETERS))
    config = Qwen2Config(vocab_size=vocabulary, num_hidden_layers=num_layers, tie_word_embeddings=False, **_LAYER)
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return 4 * sum(p.numel() for p in model.parameters()), 4 * max(root, _LAYER_PARAMETERS)
