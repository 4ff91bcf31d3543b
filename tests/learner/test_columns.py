"""The table of token columns: what every class that inherits it must keep."""

from __future__ import annotations

import pytest

from async_rl.learner.data.packing import MicroBatch
from async_rl.learner.losses.batch import LossBatch
from async_rl.learner.losses.policy import PolicyInputs
from async_rl.learner.model.policy_model import DeviceBatch
from async_rl.learner.sequences import COLUMNS, TokenColumns, TrainSequence


@pytest.mark.parametrize("kind", [TrainSequence, MicroBatch, DeviceBatch, LossBatch, PolicyInputs])
def test_no_field_of_a_class_has_the_name_of_a_column(kind: type[TokenColumns]):
    # Such a field would replace the column without a word: it would be filled twice, once with the wrong values.
    own = {name for each in kind.__mro__ if each is not TokenColumns for name in vars(each).get("__annotations__", {})}
    assert own
    assert not own & set(COLUMNS)
