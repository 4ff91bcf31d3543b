"""The docs' source of prompts and group filter in a run, as a user starts it, which is extended after its last step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.end_to_end.harness import ROOT, check_ledger, roles, steps, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task


@pytest.mark.slow
def test_a_run_trains_each_row_of_an_own_source_that_an_own_filter_keeps_once_across_a_resume(tmp_path: Path):
    pages = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("data", "rewards"))
    blocks = re.findall(r"```python\n(.*?)```", pages, re.DOTALL)
    source = tmp_path / "mine.py"
    source.write_text("".join(block for block in blocks if "def rows(" in block or "def keep(" in block))
    config = tiny_config(
        tmp_path,
        write_tiny_task(tmp_path, num_rows=8),
        data={"train": "", "source": f"{source}:rows"},
        queue={"filter_function": f"{source}:keep"},
        learner={"steps": 2},
        generator={"backend": "fake", "batch_size": 4, "allow_code": [str(source)]},
        experimental={"fake": {"mean_tokens": 4.0, "sigma": 0.3, "vocab_size": 20}},
    )
    path = write_config(tmp_path / "config.toml", config)
    with roles(tmp_path / "logs") as start:
        start("first", "launch", str(path)).succeed()
        start("second", "launch", str(path), "--set", "learner.steps=4").succeed()
    assert steps(tmp_path / "run") == [1, 2, 3, 4]
    trained = [json.loads(line)["groups"] for line in (tmp_path / "run" / "trained.jsonl").read_text().splitlines()]
    assert len({position for groups in trained for position, _ in groups}) == 16
    assert check_ledger(tmp_path / "run")["groups"]["filtered"] > 0
