"""Choose between packed and padded rows for a model, by its self-test. ``fsdp_engine`` calls it before FSDP.

A packed row costs least: prompts that a group shares are computed once, and there is no padding. Models that carry
state along the row, or whose attention can't be replaced, compute other values there. They compute padded rows.
"""

from __future__ import annotations

import logging
from typing import Literal, cast

from async_rl.errors import ModelError
from async_rl.learner.data.packing import Packing
from async_rl.learner.model.policy_model import PolicyModel
from async_rl.learner.model.self_test import check_packing
from async_rl.learner.ranks import Ranks
from async_rl.net.wire import decode, encode

logger = logging.getLogger(__name__)


def set_packing(
    policy: PolicyModel,
    setting: Literal["auto", "packed", "padded"],
    ranks: Ranks,
    *,
    tested: PolicyModel | None,
    max_length: int,
) -> None:
    """Make ``policy`` compute rows as ``setting`` says. Rank 0 tests the model and chooses for all ranks.

    Args:
        policy: unsharded.
        setting: ``learner.packing``.
        ranks: the connection to the other ranks, which all call this.
        tested: on rank 0, the same model on the host with its weights; it may have the first layers only.
        max_length: tokens of the longest sequence that will be trained on.

    Raises:
        ModelError: the model computes wrong values with this setting.
    """
    if ranks.is_leader:
        assert tested is not None
        packing = choose_packing(tested, setting, max_length=max_length)
        ranks.broadcast(encode("packing", {"packing": packing}))
    else:
        packing = cast(Packing, decode(ranks.receive()).fields["packing"])
    policy.use(packing)


def choose_packing(policy: PolicyModel, setting: Literal["auto", "packed", "padded"], *, max_length: int) -> Packing:
    """Return the way of computing rows that ``setting`` allows and in which the model passes its self-test.

    Raises:
        ModelError: there is none. The message says why, and whether padded rows would do.
    """
    if setting == "padded":
        policy.use("padded")
        check_packing(policy, max_length=max_length)
        return "padded"
    unfit = _why_unfit(policy, "packed", max_length)
    if unfit is None:
        return "packed"
    unfit_padded = _why_unfit(policy, "padded", max_length)
    if unfit_padded is not None:
        raise ModelError(f'{unfit}; and with learner.packing = "padded": {unfit_padded}') from unfit
    if setting == "packed":
        raise ModelError(f'{unfit}; or set learner.packing = "padded", with which this model can be trained') from unfit
    logger.warning(
        "the learner computes padded rows, because %s. Each answer computes its prompt again, and shorter sequences of "
        "a micro-batch are padded to its longest: the metrics packing/repeated and packing/padding say how much",
        str(unfit).removeprefix("model.path: ").partition("; choose")[0],
    )
    return "padded"


def _why_unfit(policy: PolicyModel, packing: Packing, max_length: int) -> ModelError | None:
    try:
        policy.use(packing)
        check_packing(policy, max_length=max_length)
    except ModelError as error:
        return error
    return None
