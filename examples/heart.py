"""The method in one process, made of the product's own parts: ``python examples/heart.py``, a minute on a CPU.

Of ``async_rl/``: the *generator* (``generator/loop.py``) samples under leases; the *queue* (``queue/core/``) bounds how
old data may be (``lease``, ``take``); the *learner* (``learner/loop/trainer.py``) corrects for its age
(``policy_loss``) and makes the next version. ``activate`` stands for what sends it, ``DIGEST`` for that of its bytes.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from async_rl.config.config import Config
from async_rl.config.loading import load_config
from async_rl.data.dataset import load_rows
from async_rl.extensions.quickstart.prepare import make_task
from async_rl.extensions.quickstart.tasks import SUMS
from async_rl.generator.rollouts import ActiveLeases, SingleTurnRollouts, ThreadGrader
from async_rl.generator.start.backends import build_backend
from async_rl.learner.data.batch import PreparedBatch, prepare_batch
from async_rl.learner.losses.advantages import with_advantages
from async_rl.learner.losses.policy import PolicyInputs, policy_loss
from async_rl.net.codec import decode_group, encode_group
from async_rl.queue.core import generator_requests, learner_requests
from async_rl.queue.core.admission import QueueSettings
from async_rl.queue.core.groups import read_summary
from async_rl.queue.core.prompts import PromptStream
from async_rl.queue.core.state import QueueState
from async_rl.queue.messages import Announcement, NotReady, StepAck, TrainedCounts
from async_rl.rewards.registry import build_reward

NUM_STEPS, RUN, DIGEST, NAME = 60, "0123456789abcdef", "heart", "generator-0"
READ = ("behavior_logprobs", "versions", "advantages")


class Generator:
    """Samples answers under leases. New weights come between two tokens, while answers run."""

    def __init__(self, config: Config, queue: QueueState) -> None:
        self._queue, self._leases, self.backend = queue, ActiveLeases(), build_backend(config, Path(config.model.path))
        self._rollouts = SingleTurnRollouts(self.backend, ThreadGrader(build_reward(config)))

    def turn(self) -> None:
        """Lease, sample one token of every running answer, score the answers that ended, return complete groups."""
        version, now = self.backend.version, time.monotonic()
        for lease in generator_requests.lease(self._queue, NAME, (RUN, version), 1, now).leases:
            self._leases.add(lease, self._rollouts.encode(lease), now)
        for active in self._leases.take_submittable(version):
            self._rollouts.submit(active.lease, active.prompt_ids)
        self._rollouts.take(self.backend.step())
        for graded in self._rollouts.collect():
            active = self._leases.get(graded.lease.lease_id)
            assert active is not None
            assert graded.rollout is not None
            active.add(graded.index, graded.rollout, graded.failure)
            if active.is_complete:
                self._leases.remove(active.lease.lease_id)
                payload = encode_group(active.group(NAME, dict.fromkeys(range(version + 1), DIGEST), now))
                generator_requests.receive(self._queue, NAME, read_summary(payload), payload, now)


class Learner:
    """Trains each batch once, corrected for the versions that sampled it, and publishes the next version."""

    def __init__(self, config: Config, queue: QueueState, generator: Generator) -> None:
        self._config, self._queue, self._generator, self.version = config, queue, generator, 0
        self._model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=config.optimizer.lr, weight_decay=0.0)
        learner_requests.attach(queue, RUN, "", 0, 0, NUM_STEPS, None, time.monotonic())

    def turn(self) -> None:
        """Publish a new version. If a batch is ready: advantages, corrected and clipped loss, one optimizer step."""
        if self.version > self._generator.backend.version:
            learner_requests.announce(self._queue, Announcement(RUN, self.version, DIGEST, ""))
            weights = {name: each.detach().clone() for name, each in self._model.named_parameters()}  # these go on
            self._generator.backend.activate(self.version, weights)
        taken = learner_requests.take(self._queue, RUN, self.version, self.version, time.monotonic())
        if isinstance(taken, NotReady):
            return
        groups = [item.with_group(decode_group(item.group)) for item in taken]
        loss = self._config.loss
        batch = prepare_batch(groups, mask_truncated=loss.mask_truncated, num_updates=1, known_weights=lambda _: True)
        batch = with_advantages(batch, loss)
        result = policy_loss(self._inputs(batch), loss, max_length=self._config.sampling.max_new_tokens)
        (result.loss_sum / result.denominator).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        counts = TrainedCounts(True, len(batch.rewards), {}, sum(batch.rollout_tokens), {})
        learner_requests.ack(self._queue, StepAck(RUN, self.version, self.version + 1, counts), time.monotonic())
        self.version += 1
        print(f"step {self.version} reward {batch.rewards.mean():.3f}", flush=True)

    def _inputs(self, batch: PreparedBatch) -> PolicyInputs:
        """What the loss reads of the sampled tokens: their log-probabilities now, and those when they were sampled."""
        sequences = batch.sequences
        ids = pad_sequence([torch.tensor(each.token_ids).long() for each in sequences], batch_first=True)
        is_sampled = pad_sequence([torch.tensor(each.loss_mask) for each in sequences], batch_first=True)[:, 1:]
        logprobs = self._model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[is_sampled]
        values = [np.concatenate([getattr(each, name)[each.loss_mask] for each in sequences]) for name in READ]
        behavior, versions, advantages = map(torch.from_numpy, values)
        return PolicyInputs(
            logprobs=logprobs[:, 0], behavior_logprobs=behavior, versions=versions, advantages=advantages,
            lag=self.version - versions, entropies=torch.zeros(len(logprobs)), num_sequences=len(sequences),
            sequence_index=is_sampled.nonzero()[:, 0],
        )  # fmt: skip


if __name__ == "__main__":
    config = load_config(make_task(SUMS, seed=0), ["queue.filter_range=[]", "optimizer.lr=5e-5"])
    rows = load_rows(str(config.data.train)).rows
    queue = QueueState(QueueSettings.from_config(config, vocab_size=None), rows, PromptStream(len(rows), seed=0))
    learner = Learner(config, queue, generator := Generator(config, queue))
    while learner.version < NUM_STEPS:
        learner.turn()
        generator.turn()
