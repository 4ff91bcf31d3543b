"""Two losses of your own. `dapo` is the preset of that name, built from the parts of the built-in loss; change it, or
start from `soft_clip`, which is new. To run one:

    async-rl launch CONFIG --set loss.function=examples/own_loss.py:soft_clip

`async_rl/learner/losses/own.py` says what a loss gets and must return, `docs/algorithms.md` why. Shape letters: N =
tokens of the micro-batch, S = its sequences.
"""

import torch

from async_rl.learner.losses.own import LossInputs, LossOutput
from async_rl.learner.losses.parts import SurrogateInputs, clipped, log_ratio, sum_by


def dapo(inputs: LossInputs) -> LossOutput:
    """PPO's clip with two bounds, as a mean over all tokens of the step. Sequences that are far from the policy that
    sampled them are left out.

    Every loss, gradient and metric has the bits of `loss.preset = "dapo"`.
    """
    settings, index_N, num_sequences = inputs.settings, inputs.sequence_index, inputs.num_sequences
    all_N = torch.ones_like(index_N, dtype=torch.bool)
    ratio_N = log_ratio(inputs.logprobs.detach(), inputs.behavior_logprobs, all_N).double().exp()
    lengths_S = sum_by(index_N, torch.ones_like(index_N), num_sequences).clamp(min=1)
    mean_ratio_S = sum_by(index_N, ratio_N, num_sequences) / lengths_S
    far_N = (mean_ratio_S > (settings.skip_threshold or torch.inf))[index_N]
    tokens = clipped(
        SurrogateInputs(
            # Masked before they are used, so that a masked token has no gradient.
            log_ratio=log_ratio(inputs.logprobs, inputs.behavior_logprobs, ~far_N),
            logprobs=inputs.logprobs.masked_fill(far_N, 0.0),
            advantages=inputs.advantages.masked_fill(far_N, 0.0),
        ),
        settings,
    )
    return LossOutput(
        loss_sum=-tokens.objective.sum(dtype=torch.float64),
        denominator=(~far_N).sum(),
        masks={"far": far_N},
        capped_low=tokens.capped_low,
        capped_high=tokens.capped_high,
    )


def soft_clip(inputs: LossInputs) -> LossOutput:
    """A clip without an edge: where the policy has moved as the advantage asked, the ratio r becomes
    `1 + c tanh((r - 1) / c)`, with c = `loss.clip_high`.

    PPO's gradient is whole up to the bound and 0 beyond. Here a token keeps the share `1 - tanh^2` of it: all at r = 1,
    42 % at r = 1 + c, 7 % at r = 1 + 2 c; and as much below 1 if its advantage is negative. So a token just beyond the
    bound still teaches a little. Where the policy has moved the other way nothing fades, as in PPO, so that it can turn
    back; `loss.dual_clip` limits what a token with a negative advantage can cost there. From no paper.
    """
    width, dual_clip = inputs.settings.clip_high, inputs.settings.dual_clip
    all_N = torch.ones_like(inputs.lag, dtype=torch.bool)
    ratio_N = log_ratio(inputs.logprobs, inputs.behavior_logprobs, all_N).exp()
    ahead_N = (ratio_N - 1) * inputs.advantages > 0
    share_N = torch.tanh((ratio_N - 1) / width)
    back_N = ratio_N if dual_clip is None else torch.where(inputs.advantages < 0, ratio_N.clamp(max=dual_clip), ratio_N)
    objective_N = torch.where(ahead_N, 1 + width * share_N, back_N) * inputs.advantages
    return LossOutput(
        loss_sum=-objective_N.sum(dtype=torch.float64),
        denominator=all_N.sum(),
        capped_low=ahead_N & (ratio_N < 1 - width),
        capped_high=ahead_N & (ratio_N > 1 + width),
        metrics={"gradient_left": torch.where(ahead_N, 1 - share_N.detach().square(), 1.0).sum()},
    )
