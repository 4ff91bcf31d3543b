"""The teacher's terms of on-policy distillation. Pure: tensors in, tensors out.

The policy pi samples, a teacher T scores what was sampled, and the policy minimises the reverse KL divergence
KL(pi || T) at the sampled prefixes: GKD (arXiv:2306.13649) with lambda = 1 and its divergence at beta = 1, MiniLLM
(arXiv:2306.08543). Both log-probabilities are at the sampling temperature, and pi is the policy that is trained, not
the behavior policy mu. Departures:

- Prefixes are those that mu sampled, as in every loss here: their probability is not corrected beyond the staleness
  bound. GKD samples with pi itself, and so does the gradient of this loss not flow through the sampling of prefixes.
  MiniLLM's gradient does (its advantage is the KL of all later tokens); here a token answers for itself alone.
- GKD has the whole vocabulary. A teacher sends its K likeliest tokens, and the rest counts as one token.

Shape letters: N = trained tokens, K = the teacher's likeliest tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.config.distill import DistillConfig
from async_rl.learner.losses.parts import k3, log_ratio

_LEAST_REST = 1e-6
"""The least probability of the rest. A smaller one is the rounding of log-probabilities in float32."""


def taught_advantages(
    advantages_N: Tensor, logprobs_N: Tensor, teacher_logprobs_N: Tensor, distill: DistillConfig
) -> Tensor:
    """Return advantages [N] with the teacher's: ``coef (log T - log pi)``, detached; without those of rewards if these
    don't count.

    Under the policy gradient with importance weights pi/mu, its gradient is that of KL(pi || T) at the sampled
    prefixes: the gradient of E_pi[log pi - log T] is E_pi[(log pi - log T) grad log pi]. With log mu in place of log pi
    it would be that of KL(pi || T) - KL(pi || mu), which pushes a stale policy away from mu.
    """
    base_N = advantages_N if distill.rewards else torch.zeros_like(advantages_N)
    return base_N + distill.coef * (teacher_logprobs_N - logprobs_N.detach())


def sampled_kl(logprobs_N: Tensor, behavior_logprobs_N: Tensor, teacher_logprobs_N: Tensor, kept_N: Tensor) -> Tensor:
    """Return an unbiased estimate of KL(pi || T) at each token from the sampled one, nats [N]; 0 where not kept.

    It is ``pi/mu * k3(log pi - log T)``, as DeepSeek-V3.2's KL to the reference (arXiv:2512.02556 eq. 7). Its gradient
    is ``pi/mu (log pi - log T) grad log pi``.
    """
    estimate_N = k3(log_ratio(logprobs_N, teacher_logprobs_N, kept_N))
    return estimate_N * log_ratio(logprobs_N, behavior_logprobs_N, kept_N).exp()


def top_k_kl(policy_NK: Tensor, teacher_NK: Tensor, kept_N: Tensor) -> Tensor:
    """Return KL(pi || T) at each token, over the teacher's K likeliest tokens and the rest as one, nats [N]; 0 where
    not kept.

    It is a lower bound of the whole KL, and equal to it if K is the vocabulary. No importance weight is needed, because
    at a prefix nothing is sampled. It is computed in float64, because the rest may be small.

    Args:
        policy_NK: log pi of the teacher's likeliest tokens; carries grad.
        teacher_NK: log T of the same tokens.
        kept_N: bool.
    """
    policy_NK = torch.where(kept_N[:, None], policy_NK, teacher_NK).double()
    teacher_NK = teacher_NK.double()
    top_N = (policy_NK.exp() * (policy_NK - teacher_NK)).sum(-1)
    rest_N = (1 - policy_NK.exp().sum(-1)).clamp(min=_LEAST_REST)
    teacher_rest_N = (1 - teacher_NK.exp().sum(-1)).clamp(min=_LEAST_REST)
    return top_N + rest_N * (rest_N.log() - teacher_rest_N.log())
