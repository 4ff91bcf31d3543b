"""Checks of the task: data, model, tokenizer, template, the reward on sample rows, the sandbox behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.data.chat import check_model, load_tokenizer, model_directory, render_prompt, vocabulary_size
from async_rl.data.dataset import load_rows_of, load_train_rows
from async_rl.doctor.rows import Row
from async_rl.errors import DataError, ModelError, RewardError, SandboxError, UserError
from async_rl.launch.preflight import check_code, check_train_is_set
from async_rl.process.user_code import is_code_name
from async_rl.records import TEXT_ROLE

_SHOWN_CHARS = 2000
_SAMPLE_ROWS = 3
_FORMS: Mapping[str, str] = {
    "boxed": "So it is \\boxed{%s}",
    "think_answer_tags": "<think> thoughts </think> <answer> %s </answer>",
    "exact": "<think>\nthoughts\n</think>\n<answer>\n%s\n</answer>",
    "xml_format": "<think>\nthoughts\n</think>\n<answer>\n%s\n</answer>",
}
"""A right answer as each reward wants to read it."""
_WRONG = "no such answer, 91827364"
_WRONG_PROGRAM = "```python\nprint('no such answer, 91827364')\n```"


def check_data(config: Config) -> list[Row]:
    """Every dataset loads."""
    check_train_is_set(config)
    rows: list[Row] = []
    sources = {"data.train": None, **{f"data.eval.{name}": source for name, source in config.data.eval.items()}}
    for key, source in sources.items():
        try:
            loaded = load_train_rows(config) if source is None else load_rows_of(config, source)
        except DataError as error:
            rows.append(Row(key, "FAIL", str(error), fix="mend the file, or set data.columns or data.on_bad_row"))
            continue
        found = f"{len(loaded.rows)} rows"
        if loaded.num_skipped:
            fix = "mend the file, if they should count"
            rows.append(Row(key, "WARN", f"{found}, {loaded.num_skipped} bad: {loaded.first_skipped}", fix=fix))
        else:
            rows.append(Row(key, "OK", found))
    return rows


def check_model_files(config: Config) -> list[Row]:
    """The model's config and tokenizer, and the first prompt as the model will see it."""
    try:
        directory = model_directory(config.model.path)
    except ModelError as error:
        return [Row("model", "FAIL", str(error), fix="set model.path to a directory or a hub id that can be fetched")]
    if not any(directory.glob("*.safetensors")):
        fix = "save it with save_pretrained (safetensors)"
        weights = Row("model", "FAIL", f"no *.safetensors in {directory}", fix=fix)
    else:
        weights = Row("model", "OK", f"{directory}, a vocabulary of {vocabulary_size(directory)}")
    is_chat = config.data.prompt_format == "chat"
    try:
        tokenizer = load_tokenizer(directory, needs_template=is_chat)
    except ModelError as error:
        fix = "put the files of the tokenizer beside config.json (tokenizer.json, tokenizer_config.json, a template)"
        return [weights, Row("tokenizer", "FAIL", str(error), fix=fix)]
    rows = [weights, Row("tokenizer", "OK", f"{type(tokenizer).__name__}, {len(tokenizer)} tokens")]
    return [*rows, _template_row(config, tokenizer)]


def _template_row(config: Config, tokenizer: Any) -> Row:
    try:
        row = load_train_rows(config).rows[0]
    except UserError:
        return Row("template", "skip", "no first row to render")
    if not row.messages:
        return Row("template", "skip", "the environment writes the prompts")
    try:
        ids = render_prompt(tokenizer, row.messages)
        check_model(config.model.path, row.messages)
    except ModelError as error:
        fix = "set data.system_prompt, or mend chat_template.jinja"
        return Row("template", "FAIL", str(error), fix=fix)
    text = str(tokenizer.decode(ids))
    limit = config.sampling.max_prompt_tokens
    found = f"{len(ids)} tokens of at most {limit}; the first prompt is below"
    if row.messages[0].get("role") == TEXT_ROLE:
        found = f"plain text, {found}"
    if len(ids) > limit:
        fix = "raise sampling.max_prompt_tokens, or see data.on_long_prompt"
        return Row("template", "WARN", found, fix=fix, details=text[:_SHOWN_CHARS])
    return Row("template", "OK", found, details=text[:_SHOWN_CHARS])


def check_reward(config: Mapping[str, Any]) -> list[Row]:
    """In a process of its own: right and wrong answers to the first rows, graded as a generator would."""
    from async_rl.rewards.registry import build_reward

    resolved = parse_config(dict(config), "the doctor's config")
    if resolved.environment.is_set:
        check_code(resolved)
        return [Row("reward", "skip", f"the environment {resolved.environment.name} rewards; its code is there")]
    try:
        rows = load_train_rows(resolved).rows[:_SAMPLE_ROWS]
    except UserError as error:
        return [Row("reward", "skip", f"there are no rows: {error}")]
    try:
        check_code(resolved)
        reward = build_reward(resolved)
    except SandboxError as error:
        fix = "run generators where programs can be isolated, or set reward.code.endpoint to an `async-rl verifier`"
        return [Row("sandbox", "FAIL", str(error), fix=fix)]
    except UserError as error:
        return [Row("reward", "FAIL", str(error), fix="name it in generator.allow_code, and make it importable")]
    try:
        graded = [_grade(resolved, reward, row.reward_data) for row in rows]
    except RewardError as error:
        return [Row("reward", "FAIL", f"can't grade: {error}", fix="mend the row, or the reward")]
    finally:
        reward.close()
    sandbox = [Row("sandbox", "OK", "programs run isolated")] if "code" in resolved.reward.names else []
    return [*sandbox, *_verdict(resolved.reward.type, graded)]


def _grade(config: Config, reward: Any, data: Mapping[str, Any]) -> tuple[str | None, float, float]:
    """The right answer's text (None: not known), its accuracy and that of a wrong one.

    Raises:
        RewardError: a row can't be graded.
    """
    name, gold = config.reward.type, data.get("gt_answer")
    form = _FORMS.get(name, "%s")
    right = None if gold is None or name == "code" else form % gold
    wrong = _WRONG_PROGRAM if name == "code" else _WRONG if name == "xml_format" else form % _WRONG
    accuracy = 0.0 if right is None else _accuracy(config, reward, right, data)
    return right, accuracy, _accuracy(config, reward, wrong, data)


def _accuracy(config: Config, reward: Any, text: str, data: Mapping[str, Any]) -> float:
    from async_rl.rewards.records import RewardInput

    return float(reward(RewardInput(text, data, 8, config.sampling.max_new_tokens, "stop")).accuracy)


def _verdict(name: str, graded: Sequence[tuple[str | None, float, float]]) -> list[Row]:
    known = [(text, accuracy) for text, accuracy, _ in graded if text is not None]
    refused = [text for text, accuracy in known if accuracy < 1]
    accepted = [index for index, (_, _, wrong) in enumerate(graded) if wrong > 0]
    if accepted:
        fix = (
            "whatever the model says would be rewarded: look at the reward, and at gt_answer or test_cases of this row"
        )
        found = f"{name} takes a wrong answer for right on row {accepted[0]}"
        return [Row("reward", "FAIL", found, fix=fix)]
    if refused and is_code_name(name):
        fix = "no fault if it wants another form; else look at how it reads the answer"
        found = f"{name} gave the bare right answer {refused[0]!r} less than full marks"
        return [Row("reward", "WARN", found, fix=fix)]
    if refused:
        fix = "nothing could ever be right: look at gt_answer of this row, and at reward.equality"
        return [Row("reward", "FAIL", f"{name} refuses the right answer {refused[0]!r}", fix=fix)]
    if not known:
        return [Row("reward", "OK", f"{name} refuses a wrong answer on {len(graded)} rows; no right one is known here")]
    return [Row("reward", "OK", f"{name} takes the right answer of {len(known)} rows, and refuses a wrong one")]
