"""``async-rl eval --backend vllm``: the answers of the built-in engine, without a learner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.extensions.insight.evaluation.offline import eval_settings, run_eval
from async_rl.run.directory import write_atomically
from tests.extensions.insight.evaluation.options import eval_options
from tests.generator.tiny_model import write_tokenizer
from tests.vllm.tiny import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_greedy_answers_are_those_of_the_transformers_backend(tmp_path: Path):
    make_model(4).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    questions = [f"{number}+{number}" for number in range(20)]
    rows = tmp_path / "rows.jsonl"
    write_atomically(rows, "".join(json.dumps({"prompt": q, "gt_answer": "2"}) + "\n" for q in questions))
    answers: dict[str, list[str]] = {}
    for backend in ("transformers", "vllm"):
        options = eval_options(
            datasets=(str(rows),), generator__backend=backend, data__system_prompt="", eval__max_new_tokens=12,
            model__dtype="float32", sampling__max_prompt_tokens=16, experimental__vllm={"kv_cache_bytes": 64 << 20},
            lora__rank=4, lora__publish="adapters",  # the files of a model have merged weights
        )  # fmt: skip
        models = [str(tmp_path / "model")]
        (found,) = run_eval(models, eval_settings(models, options), out=tmp_path / backend)
        assert (found.figures["rows"], found.figures["unanswered"]) == (20, 0)
        lines = (tmp_path / backend / "rows.jsonl").read_text().splitlines()
        answers[backend] = [json.loads(line)["response"] for line in lines]
    assert answers["vllm"] == answers["transformers"]
    assert len(set(answers["vllm"])) > 10
