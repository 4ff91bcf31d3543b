"""A model that computes a number for every trained token: a critic, or a reward model. Called by ``loading.py``.

Everything that the engine does with a policy it does with a value model too: packing, layouts, checkpoints, adapters.
Shape letters: N = trained tokens.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import linear

from async_rl.learner.losses.batch import SlopeFunction, TokenLogprobs
from async_rl.learner.model.heads import Head
from async_rl.learner.model.policy_model import DeviceBatch, PolicyModel


class ValueModel(PolicyModel):
    """A sequence classification model with one label, whose output is read at many tokens."""

    head_kind: ClassVar[Head] = "value"

    def forward(
        self, batch: DeviceBatch, *, entropy_grad: bool = False, predict: SlopeFunction | None = None
    ) -> TokenLogprobs:
        """Return the values of trained tokens (with grad) in the place of log-probabilities, float32 [N], and zeros.

        The value of a token is that of the hidden state *before* it, from which a policy would predict the token: in
        reinforcement learning, of the state in which it was sampled. The token itself is not read. Temperatures,
        sampling masks and ``predict`` are not used. The head is computed in float32, from its weight in the dtype of
        the model.
        """
        hidden_Nd = self.hidden_states(batch).index_select(0, batch.predict_index)
        head: nn.Linear = self.head
        bias = None if head.bias is None else head.bias.float()
        values_N = linear(hidden_Nd.float(), head.weight.float(), bias)[:, 0]
        return TokenLogprobs(values_N, torch.zeros_like(values_N))
