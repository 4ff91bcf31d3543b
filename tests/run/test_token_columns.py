"""Files of token columns come back as they were written, and damaged ones are named."""

from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from async_rl.errors import LineageError, RunError
from async_rl.run.records.token_columns import PLACES, TokenTable, columns_path, read_token_columns, write_token_columns


def a_table() -> TokenTable:
    names = ("behavior_logprobs", "logprobs", "entropies")
    numbers: dict[str, np.ndarray] = {name: np.arange(3, dtype=np.float32) for name in names}
    numbers |= {"advantages": np.array([np.nan, 1, -1], np.float32), "versions": np.array([-1, 7, 2**30], np.int32)}
    return TokenTable(
        places={name: np.array([2**40, 3]) for name in PLACES},
        sizes=np.array([1, 2]),
        numbers={**numbers, "token_ids": np.array([5, 6, 7], np.int32)},
        texts=["a", "\u202e\x00", "\ud800"],
        outcomes=["given", "trained", "stale"],
    )


def test_a_table_comes_back(tmp_path: Path):
    path = columns_path(tmp_path / "rollouts" / "step-000001.jsonl")
    assert path.name == "step-000001.tokens.parquet"
    table = a_table()
    write_token_columns(path, table)
    found = read_token_columns(path)
    assert found.sizes.tolist() == [1, 2]
    assert {name: values.tolist() for name, values in found.places.items()} == {name: [2**40, 3] for name in PLACES}
    for name, values in table.numbers.items():
        np.testing.assert_equal(found.numbers[name], values)
    assert found.texts == ["a", "\u202e\x00", "?"]  # half a surrogate pair is no text
    assert found.outcomes == table.outcomes
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_learner_that_was_replaced_while_it_wrote_leaves_the_table_of_its_successor(tmp_path: Path):
    path = tmp_path / "step-000001.tokens.parquet"
    write_token_columns(path, a_table())
    before = path.read_bytes()

    def confirm() -> None:
        assert len(list(tmp_path.iterdir())) == 2, "it is asked before all is written"
        raise LineageError("a newer learner has taken over")

    with pytest.raises(LineageError):
        write_token_columns(path, a_table(), confirm)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_damaged_file_and_one_of_something_else_is_named(tmp_path: Path):
    path = tmp_path / "step-000001.tokens.parquet"
    parquet.write_table(pyarrow.table({"a": [1]}), path)
    for content in (path.read_bytes(), b"", b"PAR1", b"no parquet at all"):
        path.write_bytes(content)
        with pytest.raises(RunError, match=r"(?s)can't read the token columns .*delete the file"):
            read_token_columns(path)
