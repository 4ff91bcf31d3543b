"""An agent with a tool, trained end to end on a CPU: ask for a price with a tool call, and answer with what it says.

    python examples/agents/price_tool.py [--seed 0] [--template llama3_1]

A small character-level model is made on the spot and warm-started on the notes of a careless pupil, who calls the tool
as it should be called, and then swaps the digits of seven prices in ten. Reinforcement learning has to find out that
reading them in order pays. The agent (``run``) is a plain loop around OpenAI's client. It knows nothing of
training; it only returns what the rollout was worth. Every step is a command that you could type yourself.

With ``--template`` the model speaks as another family's does: with a chat template of the installed trl, and a
tokenizer of words and that template's marks.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI  # here, so that it is imported once, before the agents' processes are forked

ROOT = Path(__file__).resolve().parents[2]
ITEMS = ("tea", "pea", "ham", "jam", "bun", "fig", "nut", "rye", "egg", "cod")
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "The price of an item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}
SWAPPED = 0.7
"""Share of the pupil's answers whose digits are in the wrong order."""
CHARACTERS = ' "{}:,_?abcdefghijklmnopqrstuvwxyz0123456789'
TEMPLATE = (
    "{% if tools %}<s>{% for tool in tools %}{{ tool.function.name }}{% endfor %}<end>{% endif %}"
    "{% for message in messages %}<{{ message.role[0] }}>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<end>"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
MARKS = ("<s>", "<u>", "<a>", "<t>", "<end>", "<tool_call>", "</tool_call>")
FAMILIES = {"llama3_1": ("<|eot_id|>",), "glm4moe": ("<|user|>", "<|observation|>")}
"""trl's name of a family's template -> the tokens that end the model's turns; the first one is its ``eos_token``."""


async def run(task: Any) -> float:
    """The agent: it lets the model call its tool, and judges the answer. Return 1 if the price is right."""
    prices: dict[str, str] = task.extra_info["prices"]
    messages: list[Any] = [{"role": "user", "content": task.messages[0]["content"]}]
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        for _ in range(3):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=[TOOL], max_tokens=60
            )  # fmt: skip
            message: Any = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return float((message.content or "") == prices[task.extra_info["item"]])
            for call in message.tool_calls:
                item = json.loads(call.function.arguments).get("item")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": prices.get(str(item), "?")})
    return 0.0


def call_of(item: str) -> dict[str, Any]:
    """Return the message that asks for the price of ``item``. The template writes it in its form."""
    function = {"name": "price", "arguments": {"item": item}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def write_rows(directory: Path, seed: int, num_notes: int = 20_000) -> None:
    """``sft.jsonl`` (the pupil's notes), ``train.jsonl`` and ``held_out.jsonl`` (rows with a shop's prices)."""
    rng = random.Random(seed)

    def shop() -> dict[str, str]:
        return {item: str(rng.randrange(10, 100)) for item in ITEMS}

    def row() -> dict[str, Any]:
        item = rng.choice(ITEMS)
        return {"messages": [{"role": "user", "content": f"{item}?"}], "item": item, "prices": shop()}

    def notes() -> dict[str, Any]:
        item, price = rng.choice(ITEMS), str(rng.randrange(10, 100))
        said = price[::-1] if rng.random() < SWAPPED else price
        messages = [
            {"role": "user", "content": f"{item}?"}, call_of(item),
            {"role": "tool", "content": price}, {"role": "assistant", "content": said},
        ]  # fmt: skip
        return {"messages": messages, "tools": [TOOL]}

    sets = {"sft": [notes() for _ in range(num_notes)], "train": [row() for _ in range(2000)]}
    sets["held_out"] = [row() for _ in range(256)]
    for name, rows in sets.items():
        text = "".join(json.dumps(one) + "\n" for one in rows)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


def character_tokenizer() -> Any:
    """A tokenizer of characters and marks, with a template of ours."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<pad>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_tokens([AddedToken(mark, special="tool" not in mark, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="?", chat_template=TEMPLATE
    )


def family_tokenizer(name: str, notes: Path) -> Any:
    """A tokenizer with trl's template ``name``: bytes, digits, marks, and what the ``notes`` repeat."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from transformers.utils.chat_template_utils import render_jinja_template

    if (found := find_spec("trl")) is None or not found.submodule_search_locations:
        sys.exit("--template: expected trl, whose chat templates it reads, got no such package; pip install trl")
    template = (Path(found.submodule_search_locations[0]) / f"chat_templates/{name}.jinja").read_text(encoding="utf-8")
    chats = [json.loads(line)["messages"] for line in notes.read_text(encoding="utf-8").splitlines()[:300]]
    texts, _ = render_jinja_template(conversations=chats, tools=[TOOL], chat_template=template, bos_token="")
    tokenizer, letters = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = [pre_tokenizers.Split(Regex(r"\d|[^\d\n]*\n+|[^\d\n]+"), "isolated"), letters]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(min_frequency=100, initial_alphabet=letters.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    marks = {"<pad>", *FAMILIES[name], *re.findall(r"<\|\w+\|>|</?(?:think|tool_\w+|arg_\w+)>", template)}
    tokenizer.add_tokens([AddedToken(mark, special="|" in mark, normalized=False) for mark in sorted(marks)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=FAMILIES[name][0], chat_template=template
    )


def write_model(directory: Path, seed: int, tokenizer: Any, ends: Sequence[str]) -> None:
    """A small Qwen2 with random weights. ``ends`` are the tokens that end its turns."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(list(ends)), pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    logging.disable_progress_bar()
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


CONFIG = """
[run]
dir = "{base}/run"
seed = {seed}

[model]
path = "{base}/warm_start"

[data]
train = "{base}/train.jsonl"
system_prompt = ""

[data.eval]
held_out = "{base}/held_out.jsonl"

[environment]
name = "examples/agents/price_tool.py:run"

[sampling]
group_size = 8
max_new_tokens = 160
max_prompt_tokens = 256

[queue]
max_staleness = 4

[learner]
steps = 60
groups_per_step = 8
max_tokens = 8192
num_threads = 1

[optimizer]
lr = 1e-4
warmup_steps = 5

[generator]
serve = true
allow_code = ["examples/agents/price_tool.py"]
batch_size = 64
num_threads = 1

[checkpoint]
every = 30

[eval]
every = 20

[sft]
data = "{base}/sft.jsonl"
out = "{base}/warm_start"
steps = 800
batch_size = 64
lr = 3e-3
warmup_steps = 20
schedule = "linear"
"""


def command(*arguments: str) -> None:
    """Run one async-rl command in the checkout, or end with its exit code."""
    print(f"$ async-rl {shlex.join(arguments)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "async_rl", *arguments], cwd=ROOT, check=False).returncode
    if code:
        sys.exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--template", choices=FAMILIES, help="a chat template of trl, instead of one of ours")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to launch")
    options = parser.parse_args()
    family = options.template
    base = ROOT / f"runs/price-tool/{family or ''}/seed-{options.seed}"
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    write_rows(base, options.seed, *([6000] if family else []))
    tokenizer = family_tokenizer(family, base / "sft.jsonl") if family else character_tokenizer()
    write_model(base / "base", options.seed, tokenizer, FAMILIES[family] if family else ("<end>",))
    config = base / "config.toml"
    config.write_text(CONFIG.format(base=base.relative_to(ROOT), seed=options.seed), encoding="utf-8")
    name = str(config.relative_to(ROOT))
    settings = [f"run.dir={base.relative_to(ROOT)}/sft_run", f"model.path={base.relative_to(ROOT)}/base"]
    settings += ["sft.steps=400", "sft.batch_size=32"] if family else []
    command("sft", name, *(word for one in settings for word in ("--set", one)))
    command("launch", name, *(word for one in options.set for word in ("--set", one)))


if __name__ == "__main__":
    main()
