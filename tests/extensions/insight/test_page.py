"""The page as a file: what it has, and that no text in it becomes markup."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import RunError
from async_rl.extensions.insight.report.report import write_report
from async_rl.extensions.insight.report.rollouts import CHUNK_ROLLOUTS
from async_rl.output import Progress
from tests.extensions.insight.runs import step_row, write_run

from .pages import a_rollout, a_run, an_answer, blobs, columns, header, write_answers, write_rollouts, write_tokens

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202egnp.exe\x1b[2J\u2028 {{ 7 * 7 }} ]]>&lt;"


def written(path: Path, *runs: Path, max_bytes: int = 10_000_000) -> str:
    write_report(runs, path, max_bytes=max_bytes, progress=Progress(quiet=True))
    return path.read_text(encoding="utf-8")


def test_the_page_has_curves_ledger_settings_and_notes_and_loads_nothing(tmp_path: Path):
    page = written(tmp_path / "page.html", a_run(tmp_path / "run"))
    data = json.loads(blobs(page)["data"])
    assert data["runs"][0]["evals"]["math"]["accuracy"] == [0.25, 0.75]
    assert data["descriptions"]["reward/mean"].startswith("Mean reward")
    assert re.search(r"dropped: stale</th><td>2</td><td>8</td><td>30</td>", page)
    assert "wandb did not answer" in page
    assert "No rollouts are recorded" in page
    assert "queue.<wbr>max_staleness" in page
    # It loads nothing.
    assert not re.search(r"<(link|img|iframe|object|embed)\b|\bsrc=|@import|url\(", page)
    assert "default-src &#39;none&#39;" in page


def test_text_of_models_and_users_is_never_markup(tmp_path: Path):
    run = a_run(tmp_path / "run", data={"system_prompt": HOSTILE, "train": "d.jsonl"})
    (run / "notes.log").write_text(f"{HOSTILE}\n", encoding="utf-8")
    change = {"step": 2, "changed": {"data.system_prompt": [HOSTILE, "x"]}}
    (run / "config_changes.jsonl").write_text(json.dumps(change) + "\n")
    record = a_rollout(response=HOSTILE, messages=[{"role": HOSTILE, "content": HOSTILE}], finish_reason=HOSTILE)
    write_rollouts(run, 1, [record])
    page = written(tmp_path / "page.html", run)
    assert "Loading the rollouts…<noscript>" in page
    assert page.count("<script") == 4  # data, index, one chunk, our own script
    assert page.count("</script>") == 4
    assert "<img" not in page
    assert not re.search("[\u202e\u2028\x1b]", page)
    assert "{{ 7 * 7 }}" in page
    assert header(blobs(page)["chunk-0-0"])["records"][0]["response"] == HOSTILE


def test_the_index_has_every_recorded_rollout_and_the_answers_of_evaluations(tmp_path: Path):
    run = a_run(tmp_path / "run")
    write_rollouts(run, 1, [a_rollout(masked=True, versions=[])])
    unanswered = {"row": 4, "messages": [], "response": None, "accuracy": 0.0, "finish_reason": "unanswered"}
    write_answers(run, "a-step-1", 0, [an_answer(3, response=HOSTILE), unanswered])
    write_answers(run, "math", 2, [an_answer(row) for row in range(CHUNK_ROLLOUTS + 1)])
    text = written(tmp_path / "page.html", run)
    page = blobs(text)
    index = json.loads(page["index-0"])
    sets = [index["names"][code] for code in index["set"]]
    assert sets == ["", "a-step-1", "a-step-1", *["math"] * (CHUNK_ROLLOUTS + 1)]
    assert index["step"][:4] == [1, 0, 0, 2]
    assert index["position"][1:4] == index["row"][1:4] == [3, 4, 0]
    assert (index["reward"][2], index["tokens"][2], index["stale"][:2]) == (None, None, [None, None])
    assert [index["names"][code] for code in index["cause"][:2]] == ["filter", ""]
    assert index["chunk"] == [0, 1, 1, *[2] * CHUNK_ROLLOUTS, 3]
    assert index["slot"][-2:] == [CHUNK_ROLLOUTS - 1, 0]
    assert [one["response"] for one in header(page["chunk-0-1"])["records"]] == [HOSTILE, None]
    assert header(page["chunk-0-3"])["records"][0]["row"] == CHUNK_ROLLOUTS
    assert text.count("<script") == 7  # data, index, four chunks, our own script


def test_what_does_not_fit_is_left_out_evenly_and_said(tmp_path: Path):
    run = a_run(tmp_path / "run")
    for step in range(1, 41):
        texts = (f"{step * 7919 + i * 104729:x}" * 40 for i in range(CHUNK_ROLLOUTS))  # noise
        write_rollouts(run, step, [a_rollout(index=i, response=text) for i, text in enumerate(texts)])
    page = written(tmp_path / "page.html", run, max_bytes=440_000)
    found = sorted(int(name.split("-")[2]) for name in blobs(page) if name.startswith("chunk"))
    assert len(page) < 440_000
    assert 4 <= len(found) < 40
    assert found[0] < 10
    assert found[-1] >= 30
    index = json.loads(blobs(page)["index-0"])
    assert len(index["step"]) == 40 * CHUNK_ROLLOUTS
    assert sum(chunk >= 0 for chunk in index["chunk"]) == len(found) * CHUNK_ROLLOUTS
    assert f"the text of {len(found) * CHUNK_ROLLOUTS:,} of the 2,560 recorded rollouts" in page


def test_damaged_rollouts_and_answers_are_named(tmp_path: Path):
    run = a_run(tmp_path / "run")
    write_answers(run, "math", 1, [{"row": 1}])
    with pytest.raises(RunError, match=r"expected JSON objects with accuracy, .* in .*math-step-000001\.jsonl"):
        written(tmp_path / "page.html", run)
    write_rollouts(run, 1, [a_rollout()])
    for line in ("{", "[]", '{"position": 1}'):
        (run / "rollouts" / "step-000001.jsonl").write_text(line + "\n")
        with pytest.raises(RunError, match=r"step-000001\.jsonl, got .*delete the file"):
            written(tmp_path / "page.html", run)


def test_a_place_that_can_not_be_written_is_named(tmp_path: Path):
    with pytest.raises(RunError, match=r"can't write the report .*choose another --out"):
        written(tmp_path / "missing" / "page.html", a_run(tmp_path / "run"))


def test_tokens_come_with_their_rollout(tmp_path: Path):
    run = a_run(tmp_path / "run")
    write_rollouts(run, 1, [a_rollout(position=8), a_rollout(position=9)])
    write_tokens(
        run, 1, position=9, texts=["a", "a", HOSTILE], version=123457
    )  # figures have three digits, this has all
    chunk = blobs(written(tmp_path / "page.html", run))["chunk-0-0"]
    plain, with_tokens = header(chunk)["records"]
    assert "columns" not in plain
    assert with_tokens["columns"] == [[0, 3, 4]]
    uses = [["", "context", 0, 1], ["assistant", "target", 1, 2], ["assistant", "untrained: stale", 2, 3]]
    assert (with_tokens["parts"], with_tokens["again"]) == ([uses], 0)
    assert header(chunk)["vocabulary"] == [[0, "a"], [1, "a"], [2, HOSTILE]]
    found = columns(chunk)
    assert (found["token"], found["version"]) == ([0, 1, 2], [-1, 123457, 123457])
    assert math.isnan(found["behavior"][0])
    assert found["difference"][1:] == [0, 0]
    assert "response" not in with_tokens
    assert found["entropy"] == found["advantage"] == [-0.25] * 3
    assert [header(chunk)["outcomes"][int(code)] for code in found["outcome"]] == ["given", "trained", "stale"]


def a_summary(step: int, **columns: list[Any]) -> str:
    """A row of ``summaries.jsonl``, of rollouts at two positions."""
    row = {
        "step": step, "version": 3, "positions": [4, 5], "rows": [40, 50], "sizes": [1, 2], "reward": [1, 0, 0.5],
        "accuracy": [1, 0, 0.5], "tokens": [7, 8, 9], "staleness": [0, None, 2],
        "finish": ["stop", "length", "stop"], "cause": ["", "truncated", ""], **columns,
    }  # fmt: skip
    return json.dumps(row) + "\n"


def test_rollouts_without_text_are_in_the_index_and_texts_of_untrained_steps_are_not(tmp_path: Path):
    run = a_run(tmp_path / "run")
    write_rollouts(run, 1, [a_rollout(position=5, index=1, reward=0.5)])
    write_rollouts(run, 4, [a_rollout()])  # which the resumed run has not trained again
    (run / "rollouts" / "summaries.jsonl").write_text(a_summary(1) + a_summary(2, reward=[1]))  # the second is damaged
    index = json.loads(blobs(written(tmp_path / "page.html", run))["index-0"])
    assert index["step"] == [1, 1, 1]
    assert (index["position"], index["index"], index["row"]) == ([4, 5, 5], [0, 0, 1], [40, 50, 50])
    assert (index["chunk"], index["stale"]) == ([-1, -1, 0], [0, None, 2])
    assert [index["names"][code] for code in index["cause"]] == ["", "truncated", ""]


def test_names_that_users_choose_have_no_effect_on_the_page(tmp_path: Path):
    run = write_run(tmp_path / "run", [step_row(1, **{"agent__metric__\u202ex": 1.0})])
    data = json.loads(blobs(written(tmp_path / "page.html", run))["data"])
    assert "agent/metric/\\u202ex" in data["runs"][0]["columns"]
