"""The same rows out of every kind of file, and of what ``datasets`` writes and reads."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from async_rl.data.dataset import RowRules, load_rows
from async_rl.errors import DataError

CHAT = [{"role": "user", "content": "1+1?"}]
ROWS: list[dict[str, Any]] = [
    {"messages": CHAT, "gt_answer": "2", "extra_info": {"level": 3}},
    {"messages": [{"role": "user", "content": "a,\n“b”"}], "gt_answer": "1,2", "extra_info": {"level": 4}},
]


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")


def write_json(path: Path) -> None:
    path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")


def write_csv(path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["messages", "gt_answer", "extra_info"])
        writer.writerows([json.dumps(row["messages"]), row["gt_answer"], json.dumps(row["extra_info"])] for row in ROWS)


def write_parquet(path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(ROWS), path)


def write_arrow(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    new = ipc.new_stream if path.stem == "stream" else ipc.new_file
    with new(path, table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    "rows.jsonl": write_jsonl,
    "rows.json": write_json,
    "rows.csv": write_csv,
    "rows.parquet": write_parquet,
    "rows.arrow": write_arrow,
    "stream.arrow": write_arrow,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, name: str):
    WRITERS[name](tmp_path / name)
    loaded = load_rows(str(tmp_path / name))
    assert [[dict(message) for message in row.messages] for row in loaded.rows] == [row["messages"] for row in ROWS]
    assert [dict(row.reward_data) for row in loaded.rows] == [
        {"gt_answer": row["gt_answer"], "extra_info": row["extra_info"]} for row in ROWS
    ]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_a_packed_file_is_read_by_the_ending_before(tmp_path: Path, name: str):
    WRITERS[name](tmp_path / name)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    assert load_rows(str(tmp_path / f"{name}.gz")).rows == load_rows(str(tmp_path / name)).rows


@pytest.mark.parametrize("cut", [0, 5, -3])
def test_a_packed_file_that_is_damaged_or_missing_is_refused_by_its_name(tmp_path: Path, cut: int):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}")[cut:] if cut >= 0 else gzip.compress(b"{}")[:cut])
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz"):
        load_rows(str(path))
    with pytest.raises(DataError, match=r"no dataset at data/rows\.jsonl\.gz; check the path"):
        load_rows("data/rows.jsonl.gz")


@pytest.mark.parametrize("name", WRITERS)
def test_the_digest_is_of_the_content(tmp_path: Path, name: str):
    paths = [tmp_path / "a" / name, tmp_path / "b" / name, tmp_path / "c" / name]
    for path in paths:
        path.parent.mkdir()
        WRITERS[name](path)
    content = paths[2].read_bytes()
    paths[2].write_bytes(content.replace(b"1+1?", b"1+3?", 1))
    digests = [load_rows(str(path)).digest for path in paths]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.json", '{"messages": []}', "got an object; for one object per line use"),
        ("rows.json", "[1", "expected a JSON list of objects, got .* column 3"),
        ("rows.json", '[\n{"gt_answer": "2"}]', 'rows.json: row 1: expected a row with "messages"'),
        ("rows.csv", "prompt,gt_answer\n1+1?,2\n1+2?\n", "rows.csv:3: expected 2 cells"),
        ("rows.csv", "prompt,gt_answer\n1+1?,2\n1+2?,3,4\n", "rows.csv:3: expected 2 cells"),
        ("rows.csv", 'prompt,gt_answer\n"a\nb",2\n1+2?,\n', "rows.csv:4: .* got no gt_answer"),
        ("rows.csv", "prompt,gt_answer\n", "the dataset has no rows"),
        ("rows.tsv", "prompt\tgt_answer\n1+1?\t2\n1+2?\n", "rows.tsv:3: expected 2 cells"),
        ("rows.xlsx", "PK", r"expected .*, \.csv, .*, got a spreadsheet; save it as CSV, or .*pandas\.read_excel"),
        ("rows.parquet", "not parquet", "expected a Parquet file"),
        ("rows.arrow", "not arrow", "expected an Arrow IPC file or stream"),
        ("rows.arrow", "ARROW1 but no more", "expected an Arrow IPC file or stream"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, name: str, content: str, message: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_rows(str(tmp_path / name))


def test_a_directory_has_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # What a dataset of the hub looks like once it is fetched; nothing is fetched here.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    for split, row in zip(("train", "test"), ROWS):
        parquet.write_table(pa.Table.from_pylist([row]), data / f"{split}-00000.parquet")
    assert load_rows(str(data)).rows[0].reward_data["gt_answer"] == "2"
    assert load_rows(f"test@{data}").rows[0].reward_data["gt_answer"] == "1,2"
    with pytest.raises(DataError, match=r"can't load the dataset .* \(split 'dev'\)"):
        load_rows(f"dev@{data}")


def test_rows_of_the_hub_are_rows_and_a_name_that_can_not_be_fetched_is_refused(monkeypatch: pytest.MonkeyPatch):
    import datasets

    def load_dataset(path: str, config: str | None, *, split: str) -> datasets.Dataset:
        if (path, config, split) != ("openai/gsm8k", "main", "test"):
            raise ConnectionError("no route to the hub")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = load_rows("test@openai/gsm8k:main").rows
    assert [row.reward_data["gt_answer"] for row in rows] == ["2", "1,2"]
    with pytest.raises(DataError, match=r"dataset owner/name \(split 'train'\): ConnectionError: no route"):
        load_rows("owner/name")


@pytest.mark.parametrize("name", ["owner/absent.jsonl", "absent", "./a/b", "/a/b", "test@absent.csv"])
def test_a_path_that_leads_nowhere_is_no_name_of_the_hub(name: str):
    with pytest.raises(DataError, match="no dataset at"):
        load_rows(name)


def test_a_split_of_a_saved_dataset_is_honoured_or_refused(tmp_path: Path):
    import datasets

    rows = [{"prompt": f"{number}+1?", "gt_answer": str(number + 1)} for number in range(10)]
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(str(tmp_path / "unnamed"))
    datasets.DatasetDict({"train": saved}).save_to_disk(str(tmp_path / "named"))

    def answers(source: str) -> list[str]:
        return [str(row.reward_data["gt_answer"]) for row in load_rows(source).rows]

    for place in (tmp_path / "unnamed", tmp_path / "named"):
        assert answers(str(place)) == answers(f"train@{place}") == [str(number) for number in range(1, 11)]
        assert answers(f"train[:60%]@{place}") == ["1", "2", "3", "4", "5", "6"]
        assert answers(f"train[6:]@{place}") == ["7", "8", "9", "10"]
        for missing in ("test", "train[:60"):
            with pytest.raises(DataError, match="dataset"):
                answers(f"{missing}@{place}")


def test_a_single_file_has_no_splits_but_train(tmp_path: Path):
    write_jsonl(tmp_path / "rows.jsonl")
    assert len(load_rows(f"train@{tmp_path / 'rows.jsonl'}").rows) == 2
    with pytest.raises(DataError, match="expected no split before a single file"):
        load_rows(f"test@{tmp_path / 'rows.jsonl'}")


def test_a_file_whose_name_has_an_at_sign_is_that_file(tmp_path: Path):
    write_jsonl(tmp_path / "test@rows.jsonl")
    assert len(load_rows(str(tmp_path / "test@rows.jsonl"), rules=RowRules()).rows) == 2
