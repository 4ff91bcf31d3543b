"""Mistakes of users: each is refused with exit code 2 and one message that names what is wrong and the remedy.

Nothing is written and no process of a run is started. A mistake is a change of a working config, and a part of the
message. The commands run in this process, except the trial of a reward, which has a process of its own.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.cli import main as cli
from async_rl.config.loading import parse_config
from async_rl.launch.checks import capacity
from async_rl.launch.checks.user_code_trial import _error_of_loss, _score_rows
from tests.end_to_end.harness import write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.refusal import refusal

FILE_OF_ROWS = "rows.jsonl"
GOOD = {"messages": [{"role": "user", "content": "1+1:"}], "gt_answer": "2"}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_tiny_task(tmp_path_factory.mktemp("task"), num_rows=8)


@pytest.fixture
def config(tmp_path: Path, task: dict[str, str]) -> Path:
    """A config with which ``launch`` would start; its run directory is ``tmp_path / "run"``."""
    return write_config(tmp_path / "config.toml", tiny_config(tmp_path, task))


def check_refused(
    capsys: pytest.CaptureFixture[str], config: Path, message: str, *arguments: str, command: str = "launch"
) -> None:
    before = sorted(config.parent.rglob("*"))
    said = refusal(capsys, command, str(config), *arguments)
    assert message in said
    said = re.sub(r"^(checking .* so far\)\n)+", "", said)  # progress: the trial of a loss may take some seconds
    assert said.startswith("async-rl: ")
    assert sorted(config.parent.rglob("*")) == before


def test_the_config_without_a_mistake_is_not_refused(config: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as leaving:
        cli.main(["launch", str(config), "--dry-run"])
    assert not leaving.value.code
    assert "launch would start here" in capsys.readouterr().out


SETTINGS = [
    # Names and types.
    ("queue.max_stalenes=1", "queue.max_stalenes: unknown key; did you mean queue.max_staleness?"),
    ("queues.max_staleness=1", "queues"),
    ("learner.steps=many", "learner.steps: expected a whole number, got 'many'"),
    ("learner.steps=1.5", "learner.steps: expected a whole number, got 1.5"),
    ("learner.steps=", "learner.steps: expected a whole number"),
    ("run.seed=true", "run.seed: expected a whole number"),
    ("optimizer.lr=fast", "optimizer.lr: expected a number"),
    ("loss.mask_truncated=maybe", "loss.mask_truncated: expected true or false"),
    ("learner", "expected --set section.key=value, got 'learner'"),
    ("steps=5", "expected --set section.key=value, got 'steps=5'"),
    # Ranges.
    ("learner.steps=0", "learner.steps: expected at least 1, got 0"),
    ("learner.groups_per_step=0", "learner.groups_per_step: expected at least 1, got 0"),
    ("sampling.group_size=0", "sampling.group_size"),
    ("sampling.max_new_tokens=0", "sampling.max_new_tokens: expected at least 1, got 0"),
    ("sampling.max_prompt_tokens=0", "sampling.max_prompt_tokens: expected at least 1, got 0"),
    ("sampling.top_p=0", "sampling.top_p"),
    ("sampling.top_p=1.5", "sampling.top_p"),
    ("sampling.temperature=-1", "sampling.temperature"),
    ("queue.max_staleness=-1", "queue.max_staleness"),
    ("queue.filter_range=[0.9,0.1]", "queue.filter_range"),
    ("queue.filter_range=[0.5]", "queue.filter_range"),
    ("optimizer.lr=-1", "optimizer.lr"),
    ("optimizer.lr=nan", "optimizer.lr"),
    ("generator.batch_size=0", "generator.batch_size: expected at least 1, got 0"),
    ("generator.count=-1", "generator.count"),
    ("learner.nproc=0", "learner.nproc"),
    ("lora.rank=0", "lora.rank"),
    ("checkpoint.every=-1", "checkpoint.every"),
    # Choices.
    ("reward.type=best", "reward.type: expected boxed, think_answer_tags, exact, xml_format, code, model, judge, none"),
    ("loss.preset=ppo2", "loss.preset"),
    ("generator.backend=vlm", "generator.backend"),
    ("weights.transport=carrier", "weights.transport"),
    ("model.dtype=float8", "model.dtype"),
    ("data.on_long_prompt=cut", "data.on_long_prompt"),
    # Keys that do not fit each other.
    ("weights.sync_every=9", "weights.sync_every: expected at most queue.max_staleness + 1 = 3, got 9"),
    ("reward.cache_length=12", "reward.cache_length: expected less than sampling.max_new_tokens = 12, got 12"),
    ("learner.max_tokens=27", "learner.max_tokens: expected at least 28"),
    ("sampling.max_new_tokens=113", "16 + 113 = 129 tokens: expected at most 128, the model's context length"),
    ("sampling.max_new_tokens=113", "; lower sampling.max_prompt_tokens to at most 15, or lower sampling"),
    ("sampling.max_new_tokens=128", "config.json); lower sampling.max_new_tokens"),
    ("sampling.max_prompt_tokens=2", "none of the 8 prompts of data.train has at most 2 tokens"),
    # Addresses, keys, devices.
    ("queue.address=localhost", "queue.address: expected an address tcp://HOST:PORT"),
    ("queue.address=tcp://localhost:99999", "queue.address: expected an address tcp://HOST:PORT"),
    ("queue.address=tcp://0.0.0.0:0", "pass --insecure on a network that you trust"),
    ("queue.keys=nowhere", "nowhere"),
    ("weights.transport=nccl", 'weights.transport: "nccl" needs CUDA devices'),
    ("learner.devices=[0]", "learner.devices: expected CUDA devices [0], but torch finds none here"),
    # Files, model, code.
    ("data.train=nowhere.jsonl", "no dataset at nowhere.jsonl"),
    ("data.eval.more=nowhere.jsonl", "data.eval.more: no dataset at nowhere.jsonl"),
    ("model.path=/nowhere", "model.path: expected a model directory, but there is no directory /nowhere"),
    ("run.dir=/proc/nowhere", "run.dir: can't write to /proc/nowhere"),
    ("reward.type=no_such_module:score", "no_such_module"),
    ("reward.type=nowhere.py:score", "nowhere.py"),
]


@pytest.mark.parametrize(("override", "message"), SETTINGS, ids=[override for override, _ in SETTINGS])
def test_a_wrong_setting_is_refused_with_its_key(
    override: str, message: str, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check_refused(capsys, config, message, "--set", override)


ROWS: dict[str, tuple[str, str]] = {
    "no JSON": ("1 + 1 = 2\n", f"{FILE_OF_ROWS}:1: expected one JSON object per line"),
    "a list": ("[1]\n", f"{FILE_OF_ROWS}:1: expected"),
    "no row": ("\n", "expected at least one row"),
    "no messages": ('{"gt_answer": "2"}\n', f'{FILE_OF_ROWS}:1: expected a row with "messages"'),
    "empty messages": (json.dumps({**GOOD, "messages": []}), f"{FILE_OF_ROWS}:1:"),
    "no answer": (json.dumps({"messages": GOOD["messages"]}), "got no gt_answer"),
    "no content": (json.dumps({**GOOD, "messages": [{"role": "user"}]}), f"{FILE_OF_ROWS}:1:"),
}


@pytest.mark.parametrize("mistake", ROWS)
def test_a_wrong_file_of_rows_is_refused_with_its_line(mistake: str, config: Path, capsys: pytest.CaptureFixture[str]):
    text, message = ROWS[mistake]
    path = config.parent / FILE_OF_ROWS
    path.write_text(text)
    check_refused(capsys, config, message, "--set", f"data.train={path}")


def _without(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def _with_text(name: str, text: str) -> Callable[[Path], Any]:
    return lambda model: (model / name).write_text(text)


MODELS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config.json": (_without("config.json"), "expected a config.json in"),
    "damaged config.json": (_with_text("config.json", "{"), "model.path: can't read"),
    "no model type": (_with_text("config.json", "{}"), "expected a model_type in"),
    "no tokenizer": (_without("tokenizer.json"), "expected a tokenizer in"),
    "damaged weights": (_with_text("model.safetensors", "{"), "model.safetensors"),
}


@pytest.mark.parametrize("mistake", MODELS)
def test_an_unfit_model_is_refused_with_its_file(
    mistake: str, config: Path, task: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    damage, message = MODELS[mistake]
    model = config.parent / "model"
    shutil.copytree(task["model"], model)
    damage(model)
    check_refused(capsys, config, message, "--set", f"model.path={model}")


def test_launch_names_text_that_the_tokenizer_does_not_know(config: Path, caplog: pytest.LogCaptureFixture):
    rows = config.parent / FILE_OF_ROWS
    rows.write_text(json.dumps({**GOOD, "messages": [{"role": "user", "content": "why"}]}) + "\n")
    with pytest.raises(SystemExit):
        cli.main(["launch", str(config), "--dry-run", "--set", f"data.train={rows}"])
    assert "3 of 3 tokens of the first prompt are unknown to it ('?')" in caplog.text


REWARDS = {
    "raises": ("return item.reward_data['answer']", "KeyError: 'answer' ({path}, line 2, in score: return item."),
    "None": ("pass", "expected a finite number or a RewardOutput, got None"),
    "NaN": ("return float('nan')", "expected a finite number or a RewardOutput, got nan"),
    "text": ("return 'right'", "expected a finite number or a RewardOutput, got 'right'"),
    "infinite": ("return float('inf')", "expected a finite number or a RewardOutput, got inf"),
    "only for wrong answers": ("return 1 / (item.text == '58')", "ZeroDivisionError"),
}


@pytest.mark.parametrize("mistake", REWARDS)
def test_a_reward_that_can_not_score_a_row_is_quoted_with_its_line(mistake: str, tmp_path: Path, task: dict[str, str]):
    body, message = REWARDS[mistake]
    path = tmp_path / "my_reward.py"
    path.write_text(f"def score(item):\n    {body}\n")
    changed = tiny_config(tmp_path, task, reward={"type": f"{path}:score"}, generator={"allow_code": [str(path)]})
    said, _ = _score_rows(parse_config(changed, "test"), [((), {"gt_answer": "58"})])
    assert said.startswith(f"reward.type: {path}:score can't score an answer to training row 0: ")
    assert message.format(path=path) in said


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def score(item):\n    return item.answer\n", "can't score an answer to training row 0: AttributeError"),
        (
            "import os\ndef score(item):\n    os.write(2, b'last words')\n    os._exit(3)\n",
            "its last output is below\nlast words",
        ),
    ],
)
def test_launch_tries_the_reward_in_a_process_of_its_own(
    source: str, message: str, config: Path, capsys: pytest.CaptureFixture[str]
):
    path = config.parent / "my_reward.py"
    path.write_text(source)
    chosen = ("--set", f"reward.type={path}:score", "--set", f'generator.allow_code=["{path}"]')
    check_refused(capsys, config, message, *chosen)


MEAN = """import torch
from async_rl.learner.losses.own import LossInputs, LossOutput

def loss(inputs: LossInputs) -> LossOutput:
    return LossOutput(-(inputs.advantages * inputs.logprobs).mean(), torch.tensor(1))
"""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (MEAN, "my_loss.py:loss: expected the same loss however a step is cut into micro-batches, got "),
        (
            "def loss(inputs):\n    return inputs.ratio\n",
            "'LossInputs' object has no attribute 'ratio' ({path}, line 2,",
        ),
        ("def other(inputs):\n    return None\n", "my_loss.py to define 'loss', but it does not"),
        ("loss = 3\n", "my_loss.py:loss: expected a function, got int"),
        ("import nothing_there\n", "importing {path} failed: ModuleNotFoundError: No module named 'nothing_there' ("),
    ],
)
def test_a_loss_that_can_not_train_is_named_with_what_is_wrong(
    source: str, message: str, tmp_path: Path, task: dict[str, str]
):
    path = tmp_path / "my_loss.py"
    path.write_text(source)
    said = _error_of_loss(parse_config(tiny_config(tmp_path, task, loss={"function": f"{path}:loss"}), "test"))
    assert message.format(path=path) in said


@pytest.mark.parametrize(
    ("command", "source", "message"),
    [
        ("learner", MEAN, "the same loss however a step is cut into micro-batches, got "),
        ("launch", "import os\ndef loss(inputs):\n    os._exit(3)\n", "my_loss.py:loss ended with exit code 3"),
    ],
)
def test_a_loss_is_tried_in_a_process_of_its_own(
    command: str, source: str, message: str, config: Path, capsys: pytest.CaptureFixture[str]
):
    path = config.parent / "my_loss.py"
    path.write_text(source)
    check_refused(capsys, config, message, "--set", f"loss.function={path}:loss", command=command)


def test_a_key_that_is_switched_off_is_refused_if_the_loss_does_not_read_it(
    config: Path, capsys: pytest.CaptureFixture[str]
):
    path = config.parent / "my_loss.py"
    path.write_text(MEAN.replace(".mean()", ".sum()").replace("tensor(1)", "tensor(len(inputs.lag))"))
    own = ("--set", f"loss.function={path}:loss")
    message = "my_loss.py:loss does not read loss.skip_threshold, but it is set to 0"
    check_refused(capsys, config, message, *own, "--set", "loss.skip_threshold=0")


def test_a_disk_without_room_for_a_checkpoint_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(capacity, "free_bytes", lambda path: 1000)
    check_refused(capsys, config, ": no room for one checkpoint; free disk space, choose another run.dir")


def test_a_dry_run_names_all_that_fails_and_a_launch_the_first(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(capacity, "has_gpu", lambda: False)
    monkeypatch.setattr(capacity, "available_memory", lambda with_swap: 0)
    monkeypatch.setattr(capacity, "free_bytes", lambda path: 1000)
    both = ("run.dir", "memory")
    with pytest.raises(SystemExit) as leaving:
        cli.main(["launch", str(config), "--dry-run"])
    said = capsys.readouterr().err
    assert (leaving.value.code, [f"  {name}: " in said for name in both]) == (2, [True, True])
    said = refusal(capsys, "launch", str(config))
    assert [f"{name}: " in said for name in both] == [True, False]


def test_a_machine_without_memory_for_learner_and_generators_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(capacity, "has_gpu", lambda: False)
    monkeypatch.setattr(capacity, "available_memory", lambda with_swap: 0)
    check_refused(capsys, config, "memory: expected memory for at least")


ENVIRONMENTS = {
    "def step(state:\n": "SyntaxError",
    "import nothing_of_this_name\n": "ModuleNotFoundError: No module named 'nothing_of_this_name'",
    "class Environment:\n    def __init__(self):\n        self.lines = open('/nowhere')\n"
    "    def step(self, *args):\n        pass\n": "No such file or directory",
    "def reset(extra_info):\n    return extra_info['task']\ndef step(*args):\n    pass\n": "KeyError: 'task'",
    "def reset(extra_info):\n    return 7\ndef step(*args):\n    pass\n": "reset: expected text or a list of messages",
    "def step(state, action, extra_info):\n    return {'reward': int(action), 'done': True}\n": (
        "ValueError: invalid literal for int() with base 10"
    ),
    "def step(state, action, extra_info):\n    return None\n": "step: expected a dict, got NoneType",
    "def step(state, action, extra_info):\n    return {'reward': float('nan'), 'done': True}\n": (
        "reward: expected a finite number, got nan"
    ),
    "def step(state, action, extra_info):\n    return {'reward': 1.0}\n": "next_state: expected text",
    "def step(state, action, extra_info):\n    return {'next_state': [{'role': 'user'}], 'reward': 0.0}\n": (
        "its state has no text for the model"
    ),
    "import os\ndef step(state, action, extra_info):\n    os._exit(3)\n": "process ended during a rollout",
    "import time\ndef step(state, action, extra_info):\n    time.sleep(3600)\n": "longer than environment.timeout_s",
    "async def generate(rollout):\n    pass\n": "it ended the rollout without an answer of the model",
}


@pytest.mark.parametrize("source", ENVIRONMENTS)
def test_launch_plays_the_environment_in_a_process_of_its_own(
    source: str, config: Path, capsys: pytest.CaptureFixture[str]
):
    path = config.parent / "environment.py"
    path.write_text(source)
    name = f"{path}:Environment" if "class Environment" in source else str(path)
    chosen = (f"environment.name={name}", f'generator.allow_code=["{path}"]', "environment.timeout_s=1")
    arguments = [word for setting in chosen for word in ("--set", setting)]
    check_refused(capsys, config, ENVIRONMENTS[source], *arguments)


def test_an_environment_that_fails_on_one_row_only_is_named_and_starts(
    config: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    path = config.parent / "environment.py"
    path.write_text(
        "def step(state, action, extra_info):\n"
        "    if extra_info['idx'] == 0:\n        raise ValueError('row zero')\n"
        "    return {'reward': 0.0, 'done': True}\n"
    )
    chosen = (f"environment.name={path}", f'generator.allow_code=["{path}"]', "environment.timeout_s=5")
    with pytest.raises(SystemExit) as leaving:
        cli.main(["launch", str(config), "--dry-run", *(word for setting in chosen for word in ("--set", setting))])
    assert not leaving.value.code, capsys.readouterr().err
    assert "can't play training row 0: ValueError: row zero" in caplog.text


def test_launch_plays_a_healthy_environment_and_tells_it_when_the_rollout_is_over(
    config: Path, capsys: pytest.CaptureFixture[str]
):
    path = config.parent / "environment.py"
    path.write_text(
        "def step(state, action, extra_info):\n"
        "    answer = {'role': 'assistant', 'content': action}\n"
        "    return {'next_state': [*state, answer, {'role': 'user', 'content': 'on'}], 'reward': 0.0}\n"
    )
    chosen = (f"environment.name={path}", f'generator.allow_code=["{path}"]', "environment.timeout_s=5")
    with pytest.raises(SystemExit) as leaving:
        cli.main(["launch", str(config), "--dry-run", *(word for setting in chosen for word in ("--set", setting))])
    assert not leaving.value.code, capsys.readouterr().err


COMMANDS = [
    (("launch", "nowhere.toml"), "no config file at nowhere.toml"),
    (("doctor", "nowhere.toml"), "no config file at nowhere.toml"),
    (("sweep", "nowhere.toml", "--over", "queue.max_staleness=0,1"), "no config file at nowhere.toml"),
    (("status", "--connect", "localhost:1"), "expected an address tcp://HOST:PORT"),
    (("generator", "--connect", "tcp://127.0.0.1:9", "--wait", "0.2"), "no queue answered at tcp://127.0.0.1:9"),
    (("generator", "--connect", "tcp://127.0.0.1:9", "--set", "learner.steps=3"), "a generator takes only generator.*"),
    (("export", "nowhere", "out"), "expected a checkpoint"),
    (("compare", "nowhere"), "nowhere"),
    (("launc",), "launch"),
]


@pytest.mark.parametrize(("arguments", "message"), COMMANDS, ids=[" ".join(a) for a, _ in COMMANDS])
def test_a_wrong_argument_of_a_command_is_refused(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert message in refusal(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []
