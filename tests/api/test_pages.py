"""The examples of docs/python.md and of docs/coming_from.md run as they stand there."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from async_rl.api import train as train_module
from async_rl.config.config import Config
from async_rl.config.loading import changed_keys, default_config
from async_rl.launch.launch import Ended
from async_rl.process.child import package_environment
from async_rl.run.directory import RunDir, write_atomically
from tests.end_to_end.tiny import tiny_config, write_tiny_task

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("python", "coming_from")}
BLOCKS = {name: re.findall(r"```python\n(.*?)```", page, re.DOTALL) for name, page in PAGES.items()}
MODEL = "Qwen/Qwen3-0.6B"
PORTED = (
    "run.dir=runs/sums", f"model.path={MODEL}", "data.columns={gt_answer='solution'}", "sampling.group_size=8",
    "sampling.max_new_tokens=256", "reward.scale=1.0", "reward.soft_overlong=false", "loss.preset=dapo",
    "loss.kl_coef=0.01", "optimizer.lr=1e-6", "learner.steps=200", "learner.groups_per_step=8", "checkpoint.every=50",
)  # fmt: skip
"""The settings of TRL's script in a config file, but for the names of its functions."""


def script(page: str, part: str) -> str:
    """The one example of the page that has ``part``."""
    (found,) = (block for block in BLOCKS[page] if part in block)
    return found


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configs that examples launch in a folder with ``rows.jsonl``; the runs themselves do not take place."""
    configs: list[Config] = []

    def launch(config: Config, **options: object) -> Ended:
        configs.append(config)
        path = RunDir(Path(config.run.dir)).config
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, tomli_w.dumps({"run": {"dir": config.run.dir}, "model": {"path": "m"}}))
        return Ended(0)

    monkeypatch.setattr(train_module, "launch", launch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1:", "solution": "2"}\n')
    return configs


def run_example(source: str) -> None:
    Path("train.py").write_text(source, encoding="utf-8")
    runpy.run_path("train.py", run_name="__main__")


def test_the_first_example_names_its_function_and_starts_one_run(launched: list[Config]):
    run_example(script("python", "def right").replace("run.report()", "run"))
    (config,) = launched
    assert (config.model.path, config.data.train, config.run.dir) == (MODEL, "rows.jsonl", "runs/sums")
    assert (config.reward.type, config.learner.steps) == ("train.py:right", 200)


def test_the_example_with_a_file_changes_one_key_of_it(launched: list[Config]):
    Path("sums.toml").write_text('[run]\ndir = "runs/sums"\n[model]\npath = "m"\n')
    run_example(script("python", "load_config"))
    assert [(c.run.dir, c.queue.max_staleness) for c in launched] == [("runs/bound-0", 0), ("runs/bound-4", 4)]


def test_the_example_with_rows_has_a_set_for_evaluations(launched: list[Config]):
    run_example(script("python", "Dataset.from_list"))
    (config,) = launched
    assert str(config.data.train).startswith("runs/sums/data/train-")
    assert (list(config.data.eval), config.eval.every) == (["held_out"], 20)


def test_the_ported_script_of_trl_has_the_config_of_a_file_with_its_settings(launched: list[Config]):
    run_example(script("coming_from", "async_rl.train").replace('print(run.metrics_frame()["reward/mean"])', ""))
    of_file = PAGES["coming_from"].split("\nIn a config file ")[1].split("\n\n")[0]
    functions = re.findall(r"`([a-z._]+=[^`]+)`", of_file)
    (config,) = launched
    changed = changed_keys(default_config([*PORTED, *functions]), config)
    assert {key: new for key, (_, new) in changed.items() if key not in ("data.train", "generator.batch_size")} == {
        "generator.allow_code": ["train.py"],
        "reward.type": "train.py:accuracy",
        "reward.extra.rewards.py:short": None,
        "reward.extra.train.py:short": 0.1,
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_example_trains_and_the_last_one_reads_its_run(tmp_path: Path):
    task = write_tiny_task(tmp_path, num_rows=16)
    rows = [json.loads(line) for line in Path(task["train"]).read_text().splitlines()]
    rows = [{"prompt": row["messages"][0]["content"], "gt_answer": row["gt_answer"]} for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny = tiny_config(tmp_path, task, data={"columns": {}}, learner={"steps": 2, "groups_per_step": 2})
    small = {name: tiny[name] for name in ("loss", "learner", "generator", "optimizer", "queue", "sampling")}
    (tmp_path / "small.toml").write_text(tomli_w.dumps(small | {"data": {"system_prompt": ""}}))
    train = script("python", "def right").replace(MODEL, task["model"]).replace('{"steps": 200}', '{"steps": 2}')
    train = train.replace('run="runs/sums"', 'run="runs/sums", config="small.toml"')
    printed: list[str] = []
    for name, source in (("train.py", train), ("read.py", script("python", "async_rl.Run"))):
        (tmp_path / name).write_text(source)
        done = subprocess.run(
            [sys.executable, name], cwd=tmp_path, env=package_environment() | {"OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(done.stdout)
    assert printed[0].count("finished: 2 steps") == 1
    assert printed[0].endswith("\nruns/sums/report.html\n")
    assert (tmp_path / "runs/sums/report.html").is_file()
    assert printed[1].startswith("Run('runs/sums'): finished, 2 steps 2 {'issued': ")
    assert printed[1].endswith("runs/sums/curve.png runs/sums/export\n")
