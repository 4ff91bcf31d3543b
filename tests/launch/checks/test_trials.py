"""The user's rewards, losses and environments are tried before a run, in processes of their own.

What can't be scored, trained or played is refused with exit code 2 and the code's own error. Nothing is written.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from async_rl.cli import main as cli
from async_rl.config.loading import parse_config
from async_rl.launch.checks.user_code_trial import _score_rows
from tests.end_to_end.harness import write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.refusal import refusal


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_tiny_task(tmp_path_factory.mktemp("task"), num_rows=8)


@pytest.fixture
def config(tmp_path: Path, task: dict[str, str]) -> Path:
    """A config with which ``launch`` would start."""
    return write_config(tmp_path / "config.toml", tiny_config(tmp_path, task))


def written(directory: Path, source: str) -> Path:
    path = directory / "own.py"
    path.write_text(source)
    return path


def check_refused(
    capsys: pytest.CaptureFixture[str], config: Path, message: str, *settings: str, command: str = "launch"
) -> None:
    before = sorted(config.parent.rglob("*"))
    said = refusal(capsys, command, str(config), *(word for setting in settings for word in ("--set", setting)))
    assert message in said
    said = re.sub(r"^(checking .* so far\)\n)+", "", said)  # progress: the trial of a loss may take some seconds
    assert said.startswith("async-rl: ")
    assert sorted(config.parent.rglob("*")) == before


def dry_run(config: Path, *settings: str) -> None:
    """A dry run, in which ``launch`` would start."""
    with pytest.raises(SystemExit) as leaving:
        cli.main(["launch", str(config), "--dry-run", *(word for setting in settings for word in ("--set", setting))])
    assert not leaving.value.code


REWARDS = {
    "raises": ("return item.reward_data['answer']", "KeyError: 'answer' ({path}, line 2, in score: return item."),
    "NaN": ("return float('nan')", "expected a finite number or a RewardOutput, got nan"),
    "only for wrong answers": ("return 1 / (item.text == '58')", "ZeroDivisionError"),
}


@pytest.mark.parametrize("mistake", REWARDS)
def test_a_reward_that_can_not_score_a_row_is_quoted_with_its_line(mistake: str, tmp_path: Path, task: dict[str, str]):
    body, message = REWARDS[mistake]
    path = written(tmp_path, f"def score(item):\n    {body}\n")
    changed = tiny_config(tmp_path, task, reward={"type": f"{path}:score"}, generator={"allow_code": [str(path)]})
    said, _ = _score_rows(parse_config(changed, "test"), [((), {"gt_answer": "58"})])
    assert said.startswith(f"reward.type: {path}:score can't score an answer to training row 0: ")
    assert message.format(path=path) in said


MEAN = """import torch
from async_rl.learner.losses.own import LossInputs, LossOutput

def loss(inputs: LossInputs) -> LossOutput:
    return LossOutput(-(inputs.advantages * inputs.logprobs).mean(), torch.tensor(1))
"""
DIES = "import os\ndef own(item):\n    os.write(2, b'last words')\n    os._exit(3)\n"


def test_code_that_ends_its_process_ends_only_the_trial(config: Path, capsys: pytest.CaptureFixture[str]):
    path = written(config.parent, DIES)
    allowed = f'generator.allow_code=["{path}"]'
    died = "its last output is below\nlast words"
    check_refused(capsys, config, died, f"reward.type={path}:own", allowed)
    check_refused(capsys, config, "own.py:own ended with exit code 3", f"loss.function={path}:own")
    path.write_text(MEAN)
    message = "the same loss however a step is cut into micro-batches, got "
    check_refused(capsys, config, message, f"loss.function={path}:loss", command="learner")


STEP = "def step(state, action, extra_info):\n    "
ENVIRONMENTS = {
    "no Python": ("def step(state:\n", "SyntaxError"),
    "can't be made": (
        "class Environment:\n    def __init__(self):\n        self.lines = open('/nowhere')\n"
        "    def step(self, *args):\n        pass\n",
        "No such file or directory",
    ),
    "reset raises": (f"def reset(extra_info):\n    return extra_info['task']\n{STEP}pass\n", "KeyError: 'task'"),
    "step raises": (
        f"{STEP}return {{'reward': int(action), 'done': True}}\n",
        "invalid literal for int() with base",
    ),
    "no dict": (f"{STEP}return None\n", "step: expected a dict, got NoneType"),
    "dies": (f"import os\n{STEP}os._exit(3)\n", "process ended during a rollout"),
    "hangs": (f"import time\n{STEP}time.sleep(3600)\n", "longer than environment.timeout_s"),
    "asks nothing": ("async def generate(rollout):\n    pass\n", "it ended the rollout without an answer of the model"),
}


def of_environment(path: Path, name: str, timeout_s: int) -> tuple[str, ...]:
    return f"environment.name={name}", f'generator.allow_code=["{path}"]', f"environment.timeout_s={timeout_s}"


@pytest.mark.parametrize("mistake", ENVIRONMENTS)
def test_an_environment_that_can_not_be_played_is_refused_with_its_error(
    mistake: str, config: Path, capsys: pytest.CaptureFixture[str]
):
    source, message = ENVIRONMENTS[mistake]
    path = written(config.parent, source)
    name = f"{path}:Environment" if "class Environment" in source else str(path)
    check_refused(capsys, config, message, *of_environment(path, name, timeout_s=1))


def test_an_environment_that_fails_on_one_row_only_is_named_and_starts(config: Path, caplog: pytest.LogCaptureFixture):
    # The other rows are played until the trial ends the rollout: the environment never says that it is done.
    path = written(
        config.parent,
        f"{STEP}if extra_info['idx'] == 0:\n        raise ValueError('row zero')\n"
        "    answer = {'role': 'assistant', 'content': action}\n"
        "    return {'next_state': [*state, answer, {'role': 'user', 'content': 'on'}], 'reward': 0.0}\n",
    )
    dry_run(config, *of_environment(path, str(path), timeout_s=5))
    assert "can't play training row 0: ValueError: row zero" in caplog.text
