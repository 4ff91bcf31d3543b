"""``async-rl init``: writes the first config of a new run, from flags or from answers in a terminal.

It looks at the first rows of the data to find the columns, chooses the settings that depend on the hardware, and writes
a config in which every key has a comment. With a reward of the user's own it also writes a file with a first version of
it. ``Plan`` has the answers; ``config_text`` turns them into TOML.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import typer

from async_rl.config.document import commented_toml
from async_rl.config.learner import LearnerConfig
from async_rl.config.loading import parse_config
from async_rl.config.reward import REWARD_TYPES
from async_rl.data.chat import context_length, load_tokenizer, render_prompt
from async_rl.data.dataset import parse_row, rules_of
from async_rl.data.files import Source
from async_rl.errors import AsyncRLError, ConfigError, DataError, ModelError
from async_rl.launch.checks.learner_memory import shape_of
from async_rl.launch.checks.prediction import best_step, on_machines, smallest_that_fits, tokens_of
from async_rl.learner.cards import Machines
from async_rl.output import Progress
from async_rl.process.user_code import is_code_name
from async_rl.terminal import visible

T = TypeVar("T")

OWN_REWARD = "own"
"""The answer for a reward of the user's own, for which ``init`` writes a file."""
OWN_REWARD_FILE = "reward.py"
_NUM_ROWS = 100
_PROMPTS = ("messages", "prompt", "question", "problem", "instruction", "query", "input", "text")
_ANSWERS = ("gt_answer", "answer", "final_answer", "solution", "target", "label", "expected", "output")
_WHOLE_SOLUTION = re.compile(r"####|\\boxed|\n")

_REWARD_SOURCE = '''\
"""The reward of this run. `async-rl doctor` tries it on rows of the data."""

import re


def score(item):
    """Return the reward of one answer of the model: from 0 to 1, because it counts as the accuracy, too.

    item.text is the answer, item.reward_data the row of the data without its prompt. docs/rewards.md has more, also
    about rewards outside of 0 to 1. With reward.soft_overlong = true, long answers lose up to 1 of this reward.
    """
'''
_OF_DEVICES = ("nproc", "count", "devices", "memory_fraction", "double_buffer")
_RATES = ((40 << 20, 2e-5), (800 << 20, 1e-5))
"""Learning rates of models whose files have fewer bytes: 10 million weights in float32, 400 million in bfloat16."""
_RATE = 1e-6
_HOW_TO_EVALUATE = """
# To evaluate rows that are not trained on, before, during and after training:
# [data.eval]
# held_out = "held_out.jsonl"
# [eval]
# every = 25
"""
_COMPARES_ANSWERS = r"""    known = str(item.reward_data["gt_answer"]).rpartition("####")[2].replace(",", "").strip()
    text = item.text.replace(",", "")
    numbers = re.findall(NUMBER, text)
    if re.fullmatch(NUMBER, known):  # the last number of the answer must be equal
        return float(bool(numbers) and float(numbers[-1]) == float(known))
    # else the answer must end with these words
    return float(bool(known) and re.search(rf"(?<!\w){re.escape(known)}\W*\Z", text, re.I) is not None)


NUMBER = r"(?<![\w.])-?\d+(?:\.\d+)?"
"""
_NOT_WRITTEN_YET = """\
    raise NotImplementedError(
        "the data has no column with right answers; write here how good item.text is, for example: "
        "return float(len(item.text) < 200)"
    )
"""


@dataclass(frozen=True, slots=True)
class Columns:
    """What the first rows of the data have.

    Attributes:
        names: the names of all columns, in the order of the first row.
        prompt: the column of the prompt. None if no known name is there.
        answer: the column of the reference answer. None if no known name is there.
        first_row: the first row.
        has_tests: whether the rows have tests for programs.
        has_solutions: whether the answers look like whole solutions, and not like final answers.
    """

    names: tuple[str, ...]
    prompt: str | None
    answer: str | None
    first_row: Mapping[str, Any]
    has_tests: bool
    has_solutions: bool


def look_at(data: str) -> Columns:
    """Read the first rows of the dataset ``data`` and return what is in them.

    Raises:
        DataError: the data can't be read, or its first rows are no objects.
    """
    rows: list[Mapping[str, Any]] = []
    for where, row in islice(Source(data).records(), _NUM_ROWS):
        if isinstance(row, DataError):
            raise row
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected a JSON object, got {type(row).__name__}; write each row as an object")
        rows.append(row)
    names = list(dict.fromkeys(str(name) for row in rows for name in row))
    if not names:
        raise DataError(f"expected at least one row in {data}, got none; write rows to it, or choose another")
    answers = [next((str(row[name]) for name in _ANSWERS if name in row), "") for row in rows]
    return Columns(
        tuple(names),
        prompt=next((name for name in _PROMPTS if name in names), None),
        answer=next((name for name in _ANSWERS if name in names), None),
        first_row=rows[0],
        has_tests="test_cases" in names,
        has_solutions=any(_WHOLE_SOLUTION.search(answer) for answer in answers),
    )


@dataclass(frozen=True, slots=True)
class Given:
    """What the options of ``init`` say, by the names of ``Plan``. None: ask, or choose from the data."""

    model: str | None = None
    data: str | None = None
    evaluation: str | None = None
    reward: str | None = None
    prompt: str | None = None
    answer: str | None = None
    gpus: str | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The answers from which a config is written.

    Attributes:
        model: directory or hub id of the model.
        data: the training data.
        evaluation: the evaluation data; empty for none.
        reward: a name in ``REWARD_TYPES``, ``OWN_REWARD``, or ``file.py:function``.
        prompt, answer: columns of the prompt and of the reference answer. ``answer`` is None if the data has none.
        num_gpus: number of GPUs to use.
        machines: the machine with these, if it is not this one.
        max_new_tokens: limit of an answer. None: by the hardware.
        name: name of the run's directory in ``runs``.
    """

    model: str
    data: str
    evaluation: str
    reward: str
    prompt: str
    answer: str | None
    num_gpus: int
    machines: Machines | None
    max_new_tokens: int | None
    name: str


def reward_source(plan: Plan) -> str:
    """Return the first version of the user's own reward, as Python."""
    return _REWARD_SOURCE + (_NOT_WRITTEN_YET if plan.answer is None else _COMPARES_ANSWERS)


def config_text(plan: Plan, reward_file: Path, first_row: Mapping[str, Any]) -> str:
    """Return the config of ``plan``, with comments.

    Args:
        reward_file: the file with the user's own reward, for a plan with ``OWN_REWARD``.
        first_row: the first row of the data, whose prompt must fit ``sampling.max_prompt_tokens``.

    Raises:
        ConfigError: the answers don't make a valid config.
    """
    values = _values(plan, reward_file)
    parse_config(values, "the answers")
    if Path(plan.model, "config.json").is_file():  # a model on a hub is not fetched for this
        with Progress() as progress:
            progress.show("reading the tokenizer")
            _fit_first_prompt(values, first_row)
    header = (
        f"# Written by `async-rl init`. Check it with `async-rl doctor`, run it with `async-rl launch`.\n"
        f"# Keys that are not here have their defaults: `async-rl config FILE --explain` shows all of them.\n"
        f"# Model: {plan.model}; {plan.num_gpus or 'no'} GPU{'' if plan.num_gpus == 1 else 's'}.\n\n"
    )
    return header + commented_toml(values) + ("" if plan.evaluation else _HOW_TO_EVALUATE)


def _values(plan: Plan, reward_file: Path) -> dict[str, Any]:
    own = f"{reward_file}:score" if plan.reward == OWN_REWARD else plan.reward
    columns = {"prompt": plan.prompt, "gt_answer": plan.answer}
    named = {key: column for key, column in columns.items() if column not in (None, key, "messages")}
    data: dict[str, Any] = {"train": plan.data}
    if plan.evaluation:
        data["eval"] = {"held_out": plan.evaluation}
    if named:
        data["columns"] = named
    values: dict[str, Any] = {
        "run": {"dir": f"runs/{plan.name}"},
        "model": {"path": plan.model},
        "data": data,
        "reward": {"type": own, "soft_overlong": True},
        **_sizes(plan.num_gpus),
        "optimizer": {"lr": _learning_rate(plan.model)},
        **({"eval": {"every": 25}} if plan.evaluation else {}),
    }
    _fit_context(values["sampling"], plan.model, plan.max_new_tokens)
    _fit_learner(values)
    if plan.machines is not None:
        _divide(values, plan.machines)
    if own not in REWARD_TYPES:
        values["generator"]["allow_code"] = [own.partition(":")[0]]
    return values


def guessed_sizes(model: str, given: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the sizes that ``init`` would choose for ``model`` on this machine, without the sections in ``given``.

    Devices are left to ``launch``. ``async_rl.train`` calls this for a call without a config.
    """
    found = {**_sizes(num_gpus_here()), "optimizer": {"lr": _learning_rate(model)}}
    _fit_context(found["sampling"], model)
    if not {"sampling", "environment"}.isdisjoint(given):
        found["learner"].pop("max_tokens", None)  # which has to fit the given lengths
    kept = {name: table for name, table in found.items() if name not in given}
    return {name: {key: table[key] for key in table if key not in _OF_DEVICES} for name, table in kept.items()}


def num_gpus_here() -> int:
    """Return the number of NVIDIA GPUs, by their device files."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _fit_context(sampling: dict[str, Any], model: str, max_new_tokens: int | None = None) -> None:
    """Set the limit of answers to ``max_new_tokens``, if given, and lower the limits of lengths to the context of
    ``model``, if it is here: one on a hub is not fetched for this, and ``doctor`` and ``launch`` compare its context
    with these limits.

    Raises:
        ConfigError: the context has no room for such answers.
    """
    context = context_length(model) if Path(model, "config.json").is_file() else None
    sampling["max_new_tokens"] = max_new_tokens or sampling["max_new_tokens"]
    if context is not None and sampling["max_prompt_tokens"] + sampling["max_new_tokens"] > context:
        if max_new_tokens is not None and max_new_tokens >= context:
            fix = f"of {model}, got {max_new_tokens}; leave room for prompts"
            raise ConfigError(f"--max-new-tokens: expected less than the context of {context} tokens {fix}")
        sampling["max_new_tokens"] = max_new_tokens or max(1, context - context // 2)
        sampling["max_prompt_tokens"] = max(1, context - sampling["max_new_tokens"])


def _fit_learner(values: dict[str, Any]) -> None:
    """Raise ``learner.max_tokens`` to the longest sequence."""
    longest = values["sampling"]["max_prompt_tokens"] + values["sampling"]["max_new_tokens"]
    if longest > values["learner"].get("max_tokens", LearnerConfig.model_fields["max_tokens"].default):
        values["learner"]["max_tokens"] = longest


def _fit_first_prompt(values: dict[str, Any], first_row: Mapping[str, Any]) -> None:
    """Make the first prompt fit ``sampling.max_prompt_tokens``: leave out the default system message if that is
    enough, or raise the limit as far as the model's context allows. ``doctor`` and ``launch`` report what can't be
    helped.
    """

    def size() -> int:
        config = parse_config(values, "the answers")
        messages = parse_row(first_row, "the first row", rules_of(config)).messages
        return len(render_prompt(tokenizer, messages, config.data.template_arguments))

    sampling, data = values["sampling"], values["data"]
    try:
        tokenizer = load_tokenizer(values["model"]["path"])
        needed = size()
        if needed <= sampling["max_prompt_tokens"]:
            return
        data["system_prompt"] = ""
        if size() <= sampling["max_prompt_tokens"]:
            typer.echo(
                "note: the reward's default system message leaves no room for the prompt, so data.system_prompt is "
                "empty", err=True,
            )  # fmt: skip
            return
    except (DataError, ModelError):
        needed = 0
    data.pop("system_prompt", None)
    context = context_length(values["model"]["path"])
    room = math.inf if context is None else context - sampling["max_new_tokens"]
    sampling["max_prompt_tokens"] = max(sampling["max_prompt_tokens"], int(min(2 * needed, room)))
    _fit_learner(values)


def _divide(values: dict[str, Any], machines: Machines) -> None:
    """Divide the GPUs of ``machines`` between learner and generators so that a step is fast, with as little recomputed
    as fits.

    Raises:
        UserError: nothing fits, or the model is of an unknown kind.
    """
    config = on_machines(parse_config(values, "the answers"), machines)
    shape, tokens = shape_of(config.model.path), tokens_of(config)
    if (best := best_step(shape, config, machines, tokens)) is None:
        raise ConfigError(
            f"--gpus: expected GPUs on which {config.model.path} fits, got {machines.name}; "
            f"{smallest_that_fits(shape, config, machines, tokens)}"
        )
    for key, value in best.changes.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value


def _learning_rate(model: str) -> float:
    """Return a learning rate that changes a model of this size within tens of steps.

    A model on a hub gets that of large ones: its files are not fetched for this.
    """
    size = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
    return next((rate for limit, rate in _RATES if 0 < size < limit), _RATE)


def _sizes(num_gpus: int) -> dict[str, dict[str, Any]]:
    """Return the sections that depend on the hardware: a small run without GPUs, a usual one with GPUs."""
    is_small = num_gpus == 0
    learner: dict[str, Any] = {"steps": 50 if is_small else 300, "groups_per_step": 4 if is_small else 32}
    generator: dict[str, Any] = {"count": 1, "batch_size": 16 if is_small else 128}
    if is_small:
        learner["max_tokens"] = 4096  # a micro-batch; the default's logits want tens of GiB
    if num_gpus == 1:
        learner["devices"] = generator["devices"] = [0]
        generator |= {"memory_fraction": 0.4, "double_buffer": False}
    elif num_gpus > 1:  # launch gives the first devices to the learner
        learner["nproc"] = num_gpus // 2
        generator["count"] = num_gpus - num_gpus // 2
    return {
        "sampling": {
            "group_size": 4 if is_small else 8,
            "max_prompt_tokens": 256 if is_small else 1024,
            "max_new_tokens": 128 if is_small else 1024,
        },
        "queue": {"max_staleness": 4},
        "learner": learner,
        "generator": generator,
        "checkpoint": {"every": 25},
    }


def shown_row(row: Mapping[str, Any], *, width: int) -> list[str]:
    """Return lines that show ``row``, one column a line, each at most ``width`` characters."""
    return [f"  {name}: {json.dumps(value, ensure_ascii=False, default=str)}"[:width] for name, value in row.items()]


def next_commands(config: Path, machines: Machines | None = None) -> Sequence[str]:
    """Return the commands to try next, with what they do."""
    there = [f"async-rl doctor {config} --on {machines.name}    # predicts memory and seconds"] if machines else []
    return (
        *there,
        f"async-rl doctor {config}    # checks model, data, reward and machine",
        f"async-rl launch {config}    # trains; Ctrl-C saves, the same command goes on",
        f"async-rl config {config} --explain queue    # what the keys of a section mean",
    )


def write_config(config: Path, given: Given) -> list[str]:
    """Ask for what ``given`` leaves open, write ``config``, and return the lines that say what was written.

    Raises:
        ConfigError: a file exists already or can't be written, an answer is wrong, or it is missing and there is no
            terminal to ask in. Nothing is written then.
        DataError: the data can't be read.
    """
    if config.exists():
        raise ConfigError(f"expected a new file, but {config} exists; name another file, or remove this one")
    if not config.parent.is_dir():
        raise ConfigError(f"expected a directory for {config}, got none at {config.parent}; create it first")
    reward_file = config.parent / OWN_REWARD_FILE
    plan, columns = _ask(config, given)
    text = config_text(plan, reward_file, columns.first_row)
    lines, files = [f"wrote {config}"], {config: text}
    if plan.reward == OWN_REWARD and not reward_file.exists():
        # The reward comes first. If init is killed before it writes the config, the same command completes the pair.
        files = {reward_file: reward_source(plan), **files}
        todo = "edit" if plan.answer is not None else "write"
        lines.append(f"wrote {reward_file}: {todo} its function score, which is the reward of every answer")
    elif plan.reward == OWN_REWARD:
        lines.append(f"{reward_file} exists and stays as it is; its function score is the reward of every answer")
    write_new(files)
    return [*lines, "next:", *(f"  {command}" for command in next_commands(config, plan.machines))]


def write_new(files: Mapping[Path, str]) -> None:
    """Write new files, in the order of ``files``. If one can't be written, remove those that this call created.

    Raises:
        ConfigError: a file can't be written, or exists already.
    """
    created: list[Path] = []
    try:
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:
                created.append(path)
                file.write(text)
    except BaseException as error:  # Ctrl-C also leaves no file
        for path in created:
            path.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise ConfigError(
            f"can't write {error.filename or created[-1]}: {error.strerror or error}; name a new file in a directory "
            f"with write permission and free space"
        ) from error


def _ask(config: Path, given: Given) -> tuple[Plan, Columns]:
    # With model and data given, all other answers have defaults: a command that works in a script asks nothing.
    asks = _is_terminal() and (given.model is None or given.data is None)
    model = _answer(asks, given.model, "--model", "Model (a directory, or a Hugging Face id)", _read_model)
    data, columns = _answer(
        asks, given.data, "--data", "Training data (a file, a directory, or a Hugging Face id)",
        lambda text: (text, look_at(text)),
    )  # fmt: skip
    if asks:
        width = shutil.get_terminal_size().columns
        typer.echo("\n".join(["the first row:", *map(visible, shown_row(columns.first_row, width=width))]), err=True)
    prompt = _answer(
        asks, given.prompt or columns.prompt, "--prompt-column",
        f"Column of the prompts ({', '.join(columns.names)})", partial(_read_column, "--prompt-column", data, columns),
    )  # fmt: skip
    answer = given.answer or columns.answer
    if answer is not None:
        _read_column("--answer-column", data, columns, answer)
    read_reward = partial(_read_reward, data, columns, answer)
    reward = _answer(asks, given.reward, "--reward", _REWARD_QUESTION, read_reward, _likely_reward(columns, answer))
    if columns.has_solutions and reward in REWARD_TYPES and "gt_answer" in REWARD_TYPES[reward].row_fields:
        typer.echo(
            f"note: the column {answer} seems to have whole solutions; the reward {reward} reads the answers of those "
            f"that end with #### or have \\boxed (docs/data.md), and async-rl doctor shows them; else use --reward "
            f"{OWN_REWARD}",
            err=True,
        )
    evaluation = _answer(asks, given.evaluation, "--eval", "Evaluation data (empty for none)", _read_evaluation, "")
    gpus = _answer(asks, given.gpus, "--gpus", "GPUs to use (0: CPU)", _read_gpus, str(num_gpus_here()))
    return Plan(model, data, evaluation, reward, prompt, answer, *gpus, given.max_new_tokens, config.stem), columns


def _read_model(text: str) -> str:
    """Return the model that the user has named. A model on a hub is not looked for, because that may take long."""
    path = Path(text)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"expected a model in {text}, got a directory without config.json; name another directory")
    # The id of a hub has one slash, and nothing here begins with its first part.
    is_local = (
        text.startswith((".", "/", "~")) or text.count("/") > 1 or (path.parent != Path() and path.parent.exists())
    )
    if is_local and not path.is_dir():
        raise ConfigError(f"expected a directory with a model, but there is no {text}; correct the path")
    return text


def _read_column(option: str, data: str, columns: Columns, text: str) -> str:
    if text not in columns.names:
        raise ConfigError(
            f"{option}: expected a column of {data}, which has {', '.join(columns.names)}, got {text!r}; name one of "
            f"these"
        )
    return text


def _read_reward(data: str, columns: Columns, answer: str | None, text: str) -> str:
    if text not in REWARD_TYPES and text != OWN_REWARD and not is_code_name(text, needs_attribute=True):
        raise ConfigError(
            f"--reward: expected one of {', '.join(REWARD_TYPES)}, {OWN_REWARD}, or file.py:function, got {text!r}; "
            f"name one of these"
        )
    needs = REWARD_TYPES[text].row_fields if text in REWARD_TYPES else ()
    if "gt_answer" in needs and answer is None:
        raise ConfigError(
            f"--reward {text}: expected a column with the right answers in {data}, which has "
            f"{', '.join(columns.names)}; name it with --answer-column, or use --reward {OWN_REWARD}"
        )
    if "test_cases" in needs and not columns.has_tests:
        raise ConfigError(
            f"--reward {text}: expected a column test_cases in {data}, which has {', '.join(columns.names)}; see "
            f"docs/data.md, or use --reward {OWN_REWARD}"
        )
    return text


def _read_evaluation(text: str) -> str:
    if text:
        look_at(text)
    return text


def _read_gpus(text: str) -> tuple[int, Machines | None]:
    if text.isdecimal():
        return int(text), None
    machines = Machines.parse("--gpus: expected a number; or", text)
    return machines.total_gpus, machines


_REWARD_QUESTION = f"Reward ({', '.join(REWARD_TYPES)}, {OWN_REWARD} for your own function)"


def _likely_reward(columns: Columns, answer: str | None) -> str:
    if columns.has_tests:
        return "code"
    return OWN_REWARD if answer is None or columns.has_solutions else "boxed"


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _answer(
    asks: bool, given: str | None, option: str, question: str, read: Callable[[str], T], default: str | None = None
) -> T:
    """Return what ``read`` makes of what is ``given``; else of the user's answer, or of ``default`` if ``asks`` is
    False.

    If ``read`` refuses the user's answer with an error, show the error and ask again.

    Raises:
        ConfigError: there is no default, and ``asks`` is False.
    """
    if given is not None or not asks:
        if (text := default if given is None else given) is None:
            raise ConfigError(f"{option}: expected a value, got none; pass it, or run `async-rl init` in a terminal")
        return read(text)
    while True:
        text = str(typer.prompt(question, default=default, err=True, show_default=bool(default)))
        try:
            return read(text.strip())
        except AsyncRLError as error:
            typer.echo(visible(str(error)), err=True)
