"""Claude Code, Codex and OpenAI's client finish a task in whole runs, on either engine, and are trained on it.

The model is a tiny Qwen3 that has learned by heart what the program was answered in a scripted session: to write a
file, and one of two texts, of which one is rewarded. Claude Code and Codex are proprietary: where they are not on PATH,
their tests are skipped (``npm install @anthropic-ai/claude-code @openai/codex``, and the folders of their binaries).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from async_rl.run.records.token_columns import read_token_columns
from tests.data.public_templates import tokenizer_of
from tests.end_to_end.harness import metrics, roles, write_config
from tests.end_to_end.tiny import tiny_config
from tests.extensions.agents.byte_model import learn, model_of
from tests.extensions.agents.test_chat import Server

pytestmark = [pytest.mark.agents, pytest.mark.timeout(1800)]

LONGEST = 16_384
SAID = ("It is written.", "I wrote the file.")
"""The first one is rewarded."""
END = "<|im_end|>"
OPENAI = """
import json, openai, pathlib
messages = [{"role": "user", "content": "Write hello to hello.txt"}]
properties = {"name": {"type": "string"}, "text": {"type": "string"}}
write = {"name": "write", "description": "Writes.", "parameters": {"type": "object", "properties": properties}}
with openai.OpenAI() as client:
    while len(messages) == 1 or messages[-1]["role"] == "tool":
        answer = client.chat.completions.create(
            model="policy", messages=messages, tools=[{"type": "function", "function": write}]
        )
        said = answer.choices[0].message.model_dump(exclude_none=True)
        print(json.dumps(said))
        messages.append(said)
        for call in said.get("tool_calls", []):
            asked = json.loads(call["function"]["arguments"])
            pathlib.Path(asked["name"]).write_text(asked["text"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "Done."})
"""
CLAUDE = (
    "CLAUDE_CODE_DISABLE_TERMINAL_TITLE=1 claude -p --output-format stream-json --verbose --model policy "
    "--tools Write --allowedTools Write "
    "--system-prompt 'You write files.' 'Write hello to hello.txt'"
)
CODEX = (
    "codex exec --json --skip-git-repo-check --sandbox workspace-write -m policy -c model_provider=run "
    "-c \"model_providers.run={name='run', base_url='$OPENAI_BASE_URL', env_key='OPENAI_API_KEY', "
    "wire_api='responses'}\" 'Write hello to hello.txt'"
)


def seen_by_openai(line: Any) -> list[str]:
    calls = [json.loads(call["function"]["arguments"])["text"] for call in line.get("tool_calls", [])]
    return [*calls, *filter(None, [line.get("content")])]


def seen_by_claude(line: Any) -> list[str]:
    blocks = line["message"]["content"] if line["type"] == "assistant" else []
    return [one["text"] if one["type"] == "text" else one["input"]["content"] for one in blocks]


def seen_by_codex(line: Any) -> list[str]:
    item = line.get("item", {}) if line["type"] == "item.completed" else {}
    if item.get("type") == "agent_message":
        return [item["text"]]
    return [item["command"].removeprefix("/bin/bash -lc ").strip("'")] if "command" in item else []


@dataclass(frozen=True)
class Program:
    """A program of which agents are made.

    Attributes:
        line: the shell's line that runs it, in a folder of its own. It prints lines of JSON.
        tool, arguments: the call that writes ``hello.txt``; FOLDER in an argument is the folder.
        key: the argument that the program shows.
        seen: reads from a line which texts and arguments the program was answered.
    """

    line: str
    tool: str
    arguments: Mapping[str, str]
    key: str
    seen: Callable[[Any], list[str]]


PROGRAMS = {
    "openai": Program(
        f"{sys.executable} $HERE/openai_agent.py",
        "write",
        {"name": "hello.txt", "text": "hello"},
        "text",
        seen_by_openai,
    ),
    "claude": Program(
        CLAUDE, "Write", {"file_path": "FOLDER/hello.txt", "content": "hello"}, "content", seen_by_claude
    ),
    "codex": Program(CODEX, "exec_command", {"cmd": "echo -n hello > hello.txt"}, "cmd", seen_by_codex),
}
BACKENDS = ["transformers", pytest.param("vllm", marks=pytest.mark.skipif(not find_spec("vllm"), reason="no vLLM"))]


SCRIPT = """
cd "$TMPDIR"
exec < /dev/null
env -i HOME="$TMPDIR" PATH="$PATH" HERE="$HERE" OPENAI_BASE_URL="$OPENAI_BASE_URL" OPENAI_API_KEY="$OPENAI_API_KEY" \\
  ANTHROPIC_BASE_URL="$ANTHROPIC_BASE_URL" ANTHROPIC_API_KEY="$ANTHROPIC_API_KEY" sh "$HERE/line.sh" > printed || exit 1
cp printed "$(mktemp -p "$HERE/shown" "XXXX$(cat hello.txt 2> no-file)")"
"""
"""What it printed gets a name that ends with what the file has."""


class Task:
    """A program's task in ``directory``, and what the program says there."""

    def __init__(self, directory: Path, program: Program) -> None:
        self.directory, self.program = directory, program
        (directory / "shown").mkdir()
        (directory / "line.sh").write_text(program.line)
        (directory / "openai_agent.py").write_text(OPENAI)
        (directory / "play.sh").write_text(f'HERE="{directory}"\n{SCRIPT}')
        self.command = ["sh", str(directory / "play.sh")]

    def call(self, folder: Path) -> str:
        """The call as Qwen3's template writes it."""
        arguments = {key: value.replace("FOLDER", str(folder)) for key, value in self.program.arguments.items()}
        named = json.dumps({"name": self.program.tool, "arguments": arguments})
        return f"<tool_call>\n{named}\n</tool_call>"

    def prompts(self) -> tuple[str, str]:
        """The prompts of the two calls of a session that a script answers, in a folder like those of a run."""
        folder = self.directory / "first"
        folder.mkdir()
        with closing(Server(self.directory, longest=200_000)) as server:
            server.script = [self.call(folder), SAID[0]]
            base = f"{server.front.url}/s/k"
            told = {"TMPDIR": str(folder), "OPENAI_BASE_URL": f"{base}/v1", "ANTHROPIC_BASE_URL": base}
            keys = {"OPENAI_API_KEY": "k", "ANTHROPIC_API_KEY": "k"}
            subprocess.run(self.command, env={**os.environ, **told, **keys}, check=True, timeout=300)
            assert len(server.calls) == 2
            first, second = (server.prompt(number).replace(str(folder), str(FOLDER)) for number in range(2))
            return first, second

    def seen(self) -> Counter[tuple[str, ...]]:
        """What each session of a run was answered, in order, and what its file has."""
        found = Counter[tuple[str, ...]]()
        for path in (self.directory / "shown").iterdir():
            lines = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
            found[(*(text for line in lines for text in self.program.seen(line)), path.name[4:])] += 1
        return found

    def read(self, answer: str) -> str:
        """What the program shows of an answer's tokens. A malformed call stays text."""
        try:
            call = json.loads(answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        except json.JSONDecodeError:
            return answer
        return call["arguments"].get(self.program.key, "")


FOLDER = Path(tempfile.gettempdir(), f"async-rl-agents-{os.geteuid()}")
"""Where each session of a run finds a folder of its own."""


def tokenizer_for(text: str) -> Any:
    """Qwen3's template and special tokens, and words that are frequent in ``text``, so that it is not 90,000 bytes."""
    base = tokenizer_of("qwen3")
    words = Tokenizer.from_str(base.backend_tokenizer.to_str())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    added = [token for _, token in sorted(base.added_tokens_decoder.items())]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)  # pyright: ignore[reportCallIssue]
    words.train_from_iterator([text], trainer)
    words.add_special_tokens([token for token in added if token.special])
    words.add_tokens([token for token in added if not token.special])
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=base.chat_template, eos_token=END)


def learned(first: str, second: str, directory: Path) -> None:
    """Write a model that goes on from ``first`` as ``second`` did, and from there with either of ``SAID``."""
    tokenizer = tokenizer_for(second)
    model = model_of(len(tokenizer), tokenizer.eos_token_id, longest=LONGEST)
    between = second.removeprefix(first)
    call, rest = between.split(END, 1)
    sequences = []
    for said in SAID:
        parts = [(first, False), (call + END, True), (rest, False), (said + END, True)]
        encoded = [(tokenizer.encode(text, add_special_tokens=False), is_said) for text, is_said in parts]
        ids = [token for new, _ in encoded for token in new]
        sequences.append((ids, [token if is_said else -100 for new, is_said in encoded for token in new]))
    assert learn(model, sequences) < 0.1
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def trained_answers(run_dir: Path, read: Callable[[str], str]) -> Counter[tuple[str, ...]]:
    """The answers of each trained rollout, from its trained tokens alone, and what its file must have."""
    found = Counter[tuple[str, ...]]()
    for path in sorted((run_dir / "rollouts").glob("*.tokens.parquet")):
        table = read_token_columns(path)
        begin = 0
        for size in table.sizes:
            tokens = list(zip(table.outcomes[begin : begin + size], table.texts[begin : begin + size], strict=True))
            begin += size
            parts = groupby(tokens, lambda token: token[0] == "given")
            answers = ["".join(text for _, text in part).removesuffix(END) for given, part in parts if not given]
            found[(*map(read, answers), "hello" if "<tool_call>" in answers[0] else "")] += 1
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_finishes_its_task_and_is_trained_on_what_it_saw(name: str, backend: str, tmp_path: Path):
    if name != "openai" and not shutil.which(name):
        pytest.skip(f"{name} is not on PATH")
    task = Task(tmp_path, PROGRAMS[name])
    learned(*task.prompts(), tmp_path / "model")
    (tmp_path / "reward.py").write_text(f"def score(item):\n    return float(item.text == {SAID[0]!r})\n")
    rows = str(tmp_path / "rows.jsonl")
    Path(rows).write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
    reward = str(tmp_path / "reward.py")
    raw = tiny_config(
        tmp_path, {"model": str(tmp_path / "model"), "train": rows, "held_out": rows},
        environment={"command": task.command, "timeout_s": 120.0, "session_timeout_s": 300.0},
        sampling={"group_size": 4, "max_new_tokens": 256, "max_prompt_tokens": LONGEST - 512, "temperature": 0.5},
        reward={"type": f"{reward}:score"}, log={"replayable": True}, eval={"every": 0},
        data={"epochs": 20, "eval": {}}, learner={"steps": 3, "groups_per_step": 1, "max_tokens": LONGEST},
    )  # fmt: skip
    raw["generator"] |= {"backend": backend, "serve": True, "allow_code": [" ".join(task.command), reward]}
    config = write_config(tmp_path / "config.toml", raw)
    with roles(tmp_path / "logs") as start:
        start("launch", "launch", str(config)).succeed(1500)
    run_dir = tmp_path / "run"
    trained = trained_answers(run_dir, task.read)
    assert trained.total() == 3 * 4
    assert trained <= task.seen()  # sessions of groups that came too late for the last step are seen, too
    assert any(row.get("grad_norm") for row in metrics(run_dir))
