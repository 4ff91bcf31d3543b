"""Whole runs of sft, dpo and rm on every form of a row, in JSONL and in Parquet: equal rows train equal models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from async_rl.extensions.offline.tasks import train
from tests.extensions.offline.test_sft_rows import write_in
from tests.learner.tiny import tiny_config, tiny_model

NUM_ROWS = 6
Form = Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], dict[str, Any]]
"""Makes a row of a question, a right and a wrong answer, each a message. Wrong answers are not for sft."""

OF_MESSAGES: Mapping[str, Form] = {
    "messages": lambda ask, good, _: {"messages": [ask, good]},
    "prompt and completion": lambda ask, good, _: {"prompt": [ask], "completion": [good]},
    "prompt and response": lambda ask, good, _: {"prompt": [ask], "response": good["content"]},
    "single messages": lambda ask, good, _: {"prompt": ask, "completion": good},
    "a text prompt": lambda ask, good, _: {"prompt": ask["content"], "completion": [good]},
    "nulls and times": lambda ask, good, _: {"prompt": None, "messages": [{**ask, "name": None}, good], "id": 1 << 40},
}
OF_TEXT: Mapping[str, Form] = {
    "response": lambda ask, good, _: {"prompt": ask["content"], "response": good["content"]},
    "completion": lambda ask, good, _: {"prompt": ask["content"], "completion": good["content"]},
}
WHOLE_TEXT: Mapping[str, Form] = {"text": lambda ask, good, _: {"text": ask["content"] + good["content"]}}
PAIRS_OF_MESSAGES: Mapping[str, Form] = {
    "prompt": lambda ask, good, bad: {"prompt": [ask], "chosen": good["content"], "rejected": bad["content"]},
    "messages": lambda ask, good, bad: {"messages": [ask], "chosen": good["content"], "rejected": bad["content"]},
    "messages in lists": lambda ask, good, bad: {"messages": [ask], "chosen": [good], "rejected": [bad]},
    "implicit": lambda ask, good, bad: {"chosen": [ask, good], "rejected": [ask, bad]},
    "a text prompt": lambda ask, good, bad: {"prompt": ask["content"], "chosen": [good], "rejected": [bad]},
    "single messages": lambda ask, good, bad: {"prompt": ask, "chosen": good, "rejected": bad},
}
PAIRS_OF_TEXT: Mapping[str, Form] = {
    "prompt": lambda ask, good, bad: {k: m["content"] for k, m in zip(PAIR, (ask, good, bad), strict=True)},
    "implicit": lambda ask, good, bad: {k: ask["content"] + m["content"] for k, m in zip(PAIR[1:], (good, bad))},
}
PAIR = ("prompt", "chosen", "rejected")
LABELLED_MESSAGES: Mapping[str, Form] = {
    "prompt": lambda ask, good, bad: {"prompt": [ask], **labelled(good, bad, as_text=False)},
    "messages": lambda ask, good, bad: {"messages": [ask], **labelled(good, bad, as_text=False)},
    "a text answer": lambda ask, good, bad: {"prompt": [ask], **labelled(good, bad, as_text=True)},
    "a text prompt": lambda ask, good, bad: {"prompt": ask["content"], **labelled(good, bad, as_text=False)},
    "nulls": lambda ask, good, bad: {
        "prompt": [{**ask, "name": None}],
        **labelled(good, bad, as_text=False),
        "id": None,
    },
}
LABELLED_TEXT: Mapping[str, Form] = {
    "prompt": lambda ask, good, bad: {"prompt": ask["content"], **labelled(good, bad, as_text=True)},
    "zero and one": lambda ask, good, bad: {
        "prompt": ask["content"],
        **{k: int(v) if k == "label" else v for k, v in labelled(good, bad, as_text=True).items()},
    },
}


def labelled(good: dict[str, Any], bad: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    """An answer with its label: the right one to an even sum, else the wrong one."""
    is_good = int(good["content"]) % 2 == 0
    answer = good if is_good else bad
    return {"completion": answer["content"] if as_text else [answer], "label": is_good}


def rows_of(form: Form) -> list[dict[str, Any]]:
    """Sums, whose right and wrong answers differ from the first character on."""
    return [
        form(
            {"role": "user", "content": f"{number}+1="},
            {"role": "assistant", "content": str(number + 1)},
            {"role": "assistant", "content": str(8 - number) * 2},
        )
        for number in range(NUM_ROWS)
    ]


def trained(directory: Path, command: str, form: Form, ending: str, **keys: Any) -> dict[str, Any]:
    """The weights after two steps on all rows."""
    directory.mkdir()
    tiny_model(directory / "model")
    rows = rows_of(form)
    if ending == ".parquet":
        path = write_in(ending, directory, rows)
    else:
        path = directory / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {"data": str(path), "out": str(directory / "out"), "steps": 2, "batch_size": NUM_ROWS, "lr": 1e-2, **keys}
    train(command, tiny_config(directory, "model", **{command: section}))
    return load_file(directory / "out" / "model.safetensors")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("command", "forms"),
    [
        pytest.param("sft", OF_MESSAGES, id="sft on messages"),
        pytest.param("sft", OF_TEXT, id="sft on text"),
        pytest.param("sft", WHOLE_TEXT, id="sft on whole text"),
        pytest.param("dpo", PAIRS_OF_MESSAGES, id="dpo on messages"),
        pytest.param("dpo", PAIRS_OF_TEXT, id="dpo on text"),
        pytest.param("kto", LABELLED_MESSAGES, id="kto on messages"),
        pytest.param("kto", LABELLED_TEXT, id="kto on text"),
        pytest.param("rm", PAIRS_OF_MESSAGES, id="rm on messages"),
        pytest.param("rm", PAIRS_OF_TEXT, id="rm on text"),
    ],
)
def test_a_run_on_any_form_of_the_same_rows_gives_the_same_weights(
    tmp_path: Path, command: str, forms: Mapping[str, Form]
):
    keys = {"loss": "kto"} if command == "kto" else {}
    found: Sequence[dict[str, Any]] = [
        trained(tmp_path / f"{index}{ending}", "dpo" if command == "kto" else command, form, ending, **keys)
        for index, form in enumerate(forms.values())
        for ending in (".jsonl", ".parquet")
    ]
    for weights in found[1:]:
        assert weights.keys() == found[0].keys()
        assert all((weights[name] == found[0][name]).all() for name in weights)
