"""The table of docs/templates.md: what becomes of rows, prompts and turns with each public chat template.

``python -m tests.extensions.offline.template_table`` writes it into the page.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from async_rl.data.chat import render_prompt
from async_rl.data.template import apply_template
from async_rl.errors import DataError
from async_rl.generator.backend import Sampled
from async_rl.generator.environment_rollouts import TokenizerText, Trajectory
from benchmarks.template_calls import outcome
from tests.data.public_templates import marks_of, names
from tests.extensions.offline.test_public_templates import (
    ANSWERED,
    ASKED,
    MORE,
    encoded,
    encoder_of,
    prepared,
    spelled,
    trained,
)

PAGE = Path(__file__).parents[3] / "docs" / "templates.md"
BEGIN = "<!-- written by python -m tests.extensions.offline.template_table -->\n"
_HEADER = (
    "| template | sft: one turn | two turns | thinking | tools | dpo | RL prompt | environment's second turn | "
    "agents' tool calls | trained end | sampling stops at |\n"
    f"|{'---|' * 11}\n"
)


def page() -> str:
    """The whole page, with a table made anew."""
    prose, _, _ = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    templates: dict[str, list[str]] = {}
    for name in names():
        templates.setdefault(_cells(name), []).append(f"`{name}`")
    return prose + BEGIN + "\n" + _HEADER + "".join(f"| {', '.join(of)} | {row} |\n" for row, of in templates.items())


def _cells(name: str) -> str:
    cells = [
        *(_sft(name, row) for row in ("one turn", "two turns", "thinking", "tools")),
        _dpo(name),
        _prompt(name),
        second_turn(name),
        ", ".join(outcome(name) or ("refused",)),
        *_ends(name),
    ]
    return " | ".join(cells)


def _sft(name: str, row: str) -> str:
    found = encoded(name, row)
    if not isinstance(found, str):
        return str(len(found))
    if "does not read tools" in found:
        return "no: it reads no `tools`"
    assert "write the call as its content" in found
    return "no: it renders no `tool_calls`"


def _dpo(name: str) -> str:
    try:
        encoder_of(name, "dpo").encode(0, [ASKED], [ANSWERED, *MORE], "row")
    except DataError:
        return "one turn"  # test_public_templates.py tries what the error advises
    return "any turns"


def _prompt(name: str) -> str:
    """What the prompt opens for the model: its last line."""
    tokenizer, _ = prepared(name)
    text = spelled(tokenizer, render_prompt(tokenizer, [ASKED]))
    assert text.count("Q1") == 1
    return _code(text.rpartition("Q1")[2].removesuffix("\n").rpartition("\n")[2] or text[-20:])


def second_turn(name: str) -> str:
    """Whether the second turn of an environment goes on with the tokens of the first one."""
    tokenizer, end = prepared(name)[0], marks_of(name).end
    text = TokenizerText(tokenizer)
    opened = text.render([ASKED])
    # What follows the opened turn when the template renders the answer is what the model samples, up to its end token.
    closed = str(apply_template(tokenizer, [ASKED, ANSWERED], {}, open_turn=False))
    rest = closed.removeprefix(opened)
    sampled = (rest.rpartition(end)[0] if end in rest else rest) + end
    if not closed.startswith(opened):  # the model closes the thinking that the prompt opens
        sampled = f"So.</think>A1{end}"
    ids = np.array(tokenizer.encode(sampled, add_special_tokens=False), np.int32)
    answer = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
    trajectory, zeros = Trajectory(text), np.zeros(len(ids), np.float32)
    first = trajectory.add_state(opened)
    trajectory.add_answer(Sampled("lease", 0, first, ids, zeros, zeros.astype(np.int32), "stop", answer))
    state = text.render([ASKED, {"role": "assistant", "content": answer}, MORE[0]])
    found = spelled(tokenizer, trajectory.add_state(state))
    continues = spelled(tokenizer, first) + sampled
    if not found.startswith(continues):  # the template rewrites the answer: the turn is as it would be sampled anew
        assert found == state
        return "new sequence"
    assert found.count(end) == state.count(end)
    return "goes on"


def _ends(name: str) -> tuple[str, str]:
    """The end token that is trained, and all at which sampling stops."""
    tokenizer, ends = prepared(name)
    (sequence,) = encoder_of(name).encode_turns(0, [], [ASKED, ANSWERED], "row")
    last = int(sequence.token_ids[sequence.loss_mask][-1])
    assert last in ends.ids
    assert trained(name, sequence).count(spelled(tokenizer, [last])) == 1
    stops = ", ".join(_code(spelled(tokenizer, [token])) for token in sorted(ends.ids))
    return _code(spelled(tokenizer, [last])), stops


def _code(text: str) -> str:
    return "`" + text.replace("\n", "\\n").replace("|", "\\|") + "`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
