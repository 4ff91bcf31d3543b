"""Every kind of fault that the doctor looks for, made on purpose, is a red row with a fix; a right config has none."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from async_rl.cli.main import main
from async_rl.config.config import Config
from async_rl.config.loading import config_data, config_to_toml, parse_config
from async_rl.errors import AddressError
from async_rl.extensions.quickstart import sums
from async_rl.generator.hf.backend import TransformersBackend
from async_rl.launch.checks import capacity, machine, node
from async_rl.launch.checks.capacity import HostMemory
from async_rl.launch.checks.doctor import run_in_thread
from async_rl.launch.checks.finding import Finding
from async_rl.queue.server.settings import settings_of
from async_rl.queue.storage import journal
from tests.launch.checks.made import OF_MODEL, OF_REWARD, made
from tests.learner.tiny import add_token, tiny_config, tiny_model
from tests.scorer.client.scripted import RunningScorer, ScriptedModel, free_address
from tests.scorer.test_reward_model import write_reward_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and rows that are all right."""
    path = tmp_path_factory.mktemp("doctor")
    tiny_model(path / "model")
    write_rows(path / "train.jsonl", [str(2 * i) for i in range(5)])
    return path


def write_rows(path: Path, answers: Sequence[str]) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{i} + {i} ="}], "gt_answer": a} for i, a in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


SCORER: dict[str, Any] = {"model": "rm", "address": "tcp://127.0.0.1:5570", "backend": "vllm"}
BY_MODEL: dict[str, Any] = {"reward": {"type": "model", "model": "rm"}, "queue": {"filter_range": []}}


FAKE: dict[str, Any] = {"generator": {"backend": "fake"}}


def make_config(root: Path, model: str = "model", train: str = "train.jsonl", **sections: Any) -> Config:
    sections["data"] = {"train": str(root / train), "system_prompt": "", **sections.get("data", {})}
    sections.setdefault("reward", {"equality": "exact"})
    sections["sampling"] = {"max_new_tokens": 24, "max_prompt_tokens": 64, **sections.get("sampling", {})}
    return tiny_config(root, model, **sections)


def plain(config: Config) -> dict[str, Any]:
    return config_data(config)


def red(rows: Sequence[Finding]) -> Finding:
    """The one red row; every one that is not green has a fix."""
    assert all(row.fix for row in rows if row.state in ("FAIL", "WARN"))
    (found,) = [row for row in rows if row.state == "FAIL"]
    return found


def peer(address: str) -> list[Finding]:
    return run_in_thread("peer", lambda: node.check_peer(address, None, insecure=False))


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_port_that_is_taken(root: Path, taken_port: int):
    config = make_config(root, queue={"address": f"tcp://127.0.0.1:{taken_port}"})
    row = red(made(config, "queue.address"))
    assert (row.check, str(taken_port) in row.found) == ("queue.address", True)


def test_an_address_that_is_open_to_the_network_without_keys(root: Path):
    row = red(made(make_config(root, queue={"address": "tcp://0.0.0.0:0"}), "queue.address"))
    assert "keys new" in row.fix


def test_an_address_where_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    row = red(peer(f"tcp://127.0.0.1:{port}"))
    assert f"nothing listens at 127.0.0.1:{port} (connection refused)" in row.found


def test_an_address_where_something_else_listens(taken_port: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node, "_ANSWER_S", 0.2)
    row = red(peer(f"tcp://127.0.0.1:{taken_port}"))
    assert "did not answer request 'ping' within 0.2 s" in row.found


def test_versions_that_differ_from_the_peers():
    row = node._versions_row({"async-rl": "0.1.0", "torch": "2.11.0"}, {"async-rl": "0.1.0", "torch": "2.13.0"})
    assert (row.state, row.found) == ("WARN", "torch 2.11.0 there, 2.13.0 here")


def test_a_container_without_shared_memory_for_several_gpus_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sizes = {"docker": 64 << 20, "host": 8 << 30}
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(total=sizes[path.name]))
    for name in sizes:
        (tmp_path / name).mkdir()
    (row,) = machine.check_shared_memory(2, tmp_path / "docker")
    assert (row.state, row.found.split(";")[0]) == ("WARN", f"{tmp_path / 'docker'} has 64 MiB")
    (row,) = machine.check_shared_memory(2, tmp_path / "missing")
    assert "does not exist" in row.found
    assert not list(machine.check_shared_memory(2, tmp_path / "host"))
    assert not list(machine.check_shared_memory(1, tmp_path / "docker"))


def test_an_interface_that_does_not_exist(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert "nosuch0" in red(made(make_config(root), "interface")).found


def test_two_ranks_meet_over_loopback_and_not_on_an_address_of_another_machine():
    row = machine.check_collective("127.0.0.1", "gloo")
    assert row.state == "OK"
    with pytest.raises(AddressError, match="assign"):
        machine.check_collective("192.0.2.1", "gloo")


def test_a_missing_tokenizer(root: Path):
    directory = root / "bare"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        (directory / name).write_bytes((root / "model" / name).read_bytes())
    row = red(made(make_config(root, "bare"), *OF_MODEL))
    assert (row.check, "tokenizer" in row.found) == ("template", True)


def test_a_reward_model_in_place_of_the_policy(root: Path):
    directory = write_reward_model(root / "judge", tie_word_embeddings=True)
    row = red(made(make_config(root, directory.name), *OF_MODEL))
    assert (row.check, "got Qwen2ForSequenceClassification" in row.found) == ("model", True)


def test_a_template_that_fails_on_the_first_prompt(root: Path):
    directory = root / "odd_template"
    directory.mkdir()
    for path in (root / "model").iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    (directory / "chat_template.jinja").write_text("{{ raise_exception('no user here') }}")
    row = red(made(make_config(root, "odd_template"), *OF_MODEL))
    assert (row.check, "no user here" in row.found) == ("template", True)


def test_the_first_prompt_is_shown_as_it_is_rendered(root: Path):
    rows = made(make_config(root), *OF_MODEL)
    assert [row.state for row in rows] == ["OK", "OK", "OK", "OK"]
    assert "<|user|>" in rows[-1].details
    assert rows[-1].details.endswith("<|assistant|>")


def test_the_tokens_that_end_a_turn_are_listed_with_the_reason(root: Path):
    directory = root / "unlisted"
    directory.mkdir()
    for path in (root / "model").iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}<|user|>{% endfor %}")
    row = made(make_config(root, "unlisted"), *OF_MODEL)[2]
    assert (row.check, row.state) == ("end of turn", "OK")
    assert "<|user|> (2: the chat template writes it after an answer)" in row.found
    assert "the tokenizer's eos_token" in row.found
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    row = made(make_config(root, "unlisted"), *OF_MODEL)[2]
    assert (row.state, "writes no end token" in row.found) == ("WARN", True)


def test_text_that_the_tokenizer_does_not_know(root: Path):
    sums.write_model(root / "digits", seed=0)  # it knows digits, a few signs, and the letters of \\boxed
    rows = [{"messages": [{"role": "user", "content": text}], "gt_answer": "3"} for text in ("1+2=", "who 12")]
    (root / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = made(make_config(root, "digits", train="letters.jsonl"), "tokenizer")
    assert (row.check, row.state) == ("tokenizer", "WARN")
    assert "2 of 10 tokens of the first 2 prompts are unknown to it ('?')" in row.found  # w and h
    assert row.fix.startswith("use a model whose tokenizer knows")
    assert made(make_config(root, "digits"), "tokenizer")[0].state == "OK"


def test_a_token_of_the_data_that_the_embedding_has_no_row_for(root: Path):
    add_token(tiny_model(root / "grown"), "<new>")
    _, row, *_ = made(make_config(root, "grown"), *OF_MODEL)
    assert (row.state, row.found.partition(", ")[2]) == (
        "OK", "46 tokens, 1 of them without a row in the model's embedding, so that no text may contain them"
    )  # fmt: skip
    rows = [{"messages": [{"role": "user", "content": text}], "gt_answer": "3"} for text in ("1+2=", "2+<new>")]
    (root / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for data in ({"train": str(root / "new.jsonl")}, {"eval": {"new": str(root / "new.jsonl")}}):
        row = red(made(make_config(root, "grown", data=data), *OF_MODEL))
        assert (row.check, "embedding of 45 rows has a row for, got <new> (45)" in row.found) == ("tokenizer", True)
        assert row.fix.startswith("resize the model")


def test_an_end_token_that_lora_cant_teach(root: Path):
    path = tiny_model(root / "untrained") / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][0] = 0
    save_file(weights, path, {"format": "pt"})
    assert made(make_config(root, "untrained"), "lora.rank") == []
    (row,) = made(make_config(root, "untrained", lora={"rank": 2}), "lora.rank")
    assert (row.state, "<|end|> (0), which ends an answer, was never trained" in row.found) == ("WARN", True)


def test_data_that_is_missing_and_data_that_is_bad(root: Path):
    assert red(made(make_config(root, train="none.jsonl"), "data")).found.startswith("data.train: ")
    (root / "bad.jsonl").write_text('{"messages": 3}\n')
    row = red(made(make_config(root, data={"eval": {"held": str(root / "bad.jsonl")}}), "data"))
    assert (row.found.startswith("data.eval.held: "), "bad.jsonl:1" in row.found) == (True, True)


def test_a_reward_that_refuses_the_right_answer(root: Path):
    # A box that is closed too early by the answer itself.
    write_rows(root / "braces.jsonl", ["1", "}{"])
    row = red(made(make_config(root, train="braces.jsonl"), *OF_REWARD))
    assert (row.check, "rejects the right answer" in row.found) == ("reward", True)


def test_a_reward_that_takes_any_answer(root: Path):
    source = root / "generous.py"
    source.write_text("def reward(item):\n    return 1.0\n")
    reward = {"type": f"{source}:reward"}
    config = make_config(root, reward=reward, generator={"allow_code": [str(source)]})
    assert "accepts a wrong answer" in red(made(config, *OF_REWARD)).found
    assert "allow_code" in red(made(make_config(root, reward=reward), *OF_REWARD)).fix


def test_a_reward_that_is_right(root: Path):
    (row,) = made(make_config(root), *OF_REWARD)
    assert row.state == "OK"


def test_the_row_s_answer_is_shown_as_the_reward_reads_it(root: Path):
    write_rows(root / "golds.jsonl", ["2 + 2 = 4\n#### 72", r"so it is $\boxed{5}$.", r"$\frac{1}{2}$"])
    (row,) = made(make_config(root, train="golds.jsonl", reward={"type": "boxed"}), *OF_REWARD)
    assert (row.state, row.found) == (
        "OK",
        "boxed accepts the right answer of 3 rows and rejects a wrong one; it reads the rows' answers as '72', '5', "
        r"'\\frac{1}{2}'",
    )


def test_answers_that_say_nothing_are_counted(root: Path):
    write_rows(root / "proofs.jsonl", ["4", "proof", "5", "notfound"])
    data = made(make_config(root, train="proofs.jsonl", reward={"type": "boxed"}), "data")
    assert [row.state for row in data] == ["FAIL"]
    assert "gt_answer: expected an answer that can be compared, got the text 'proof'" in data[0].message
    assert "(2 of 4 rows have errors)" in data[0].message


def test_a_network_file_system_and_a_full_disk(root: Path, monkeypatch: pytest.MonkeyPatch):
    assert [row.state for row in made(make_config(root), "run.dir", "model", "disk")[1:]] == ["OK", "OK"]
    monkeypatch.setattr(journal, "file_system_at", lambda path: "nfs4")
    assert red(made(make_config(root), "run.dir", "model", "disk")[1:]).found.startswith("queue.journal_dir: ")
    monkeypatch.setattr(journal, "file_system_at", lambda path: "ext4")
    monkeypatch.setattr(capacity, "free_bytes", lambda path: 1000)
    row = red(made(make_config(root), "run.dir", "model", "disk")[1:])
    assert (row.check, "no room for one" in row.found) == ("run.dir", True)


def test_a_vllm_that_is_asked_for_and_not_there(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "package_versions", lambda: {"python": "3.11", "torch": "2.9", "pyzmq": "27.0"})
    rows = made(make_config(root, generator={"backend": "vllm"}), "versions", "engines")
    assert {row.check: row.state for row in rows} == {
        "python": "OK", "torch": "WARN", "transformers": "FAIL", "pyzmq": "OK", "vllm": "FAIL",
    }  # fmt: skip


def test_a_checkout_that_is_not_installed_says_itself_what_it_requires(root: Path, monkeypatch: pytest.MonkeyPatch):
    def requires(package: str) -> list[str]:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(machine, "package_versions", lambda: {"python": "3.11", "torch": "2.9", "pyzmq": "27.0"})
    installed = made(make_config(root), "versions", "engines")
    monkeypatch.setattr(machine, "requires", requires)
    assert made(make_config(root), "versions", "engines") == installed
    (torch,) = (row for row in installed if row.check == "torch")
    assert torch.found.startswith("2.9, async-rl requires ")


@pytest.mark.parametrize(
    ("sections", "state", "key"),
    [
        ({"generator": {"backend": "vllm", "count": 0}}, "OK", "generator.backend"),
        ({"learner": {"generate": True, "generate_backend": "vllm"}}, "FAIL", "learner.generate_backend"),
        ({"scorer": {"rm": SCORER}, **BY_MODEL}, "FAIL", "scorer.rm.backend"),
        ({"scorer": {"rm": SCORER | {"launch": False}}, **BY_MODEL}, "OK", "scorer.rm.backend"),
        ({"scorer": {"rm": SCORER | {"backend": "transformers"}}, **BY_MODEL}, "OK", ""),
    ],
)
def test_a_vllm_that_is_not_there_is_red_where_something_on_this_machine_needs_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], state: str, key: str
):
    monkeypatch.setattr(machine, "package_versions", lambda: {"python": "3.11"})
    row = made(make_config(root, **sections), "versions", "engines")[-1]
    assert (row.check, row.state) == ("vllm", state)
    here = "not installed, but" if state == "FAIL" else "not installed here;"
    assert row.found.startswith(f'{here} {key} = "vllm"' if key else "not installed, and not needed")


def test_what_would_stop_a_launch_is_red_here_too(root: Path):
    learner = {"generate": True, "generate_groups": 1, "groups_per_step": 2}
    cases: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("ranks", "parallel", {"parallel": {"tensor": 2}}),
        ("ranks", "learner.generate_groups", {"learner": learner, "generator": {"count": 0}}),
        ("parallel", "parallel.pipeline", {"parallel": {"pipeline": 3}, "learner": {"nproc": 3}}),
        ("engine keys", "generator.memory", {"generator": {"backend": "transformers", "memory_fraction": 0.5}}),
        ("experimental.fake", "experimental.fake.vocab_size", FAKE | {"experimental": {"fake": {"vocab_size": 10**6}}}),
    )
    for name, key, sections in cases:
        row = red(made(make_config(root, **sections), name))
        assert (row.check, row.found.startswith(key)) == (name, True), row


def test_keys_that_are_missing(root: Path):
    row = red(made(make_config(root, queue={"keys": str(root / "nokeys")}), "keys"))
    assert "keys new" in row.fix


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}])
def test_engine_and_learner_agree_about_a_right_model(root: Path, sampling: dict[str, Any]):
    rows = made(make_config(root, sampling=sampling), "parity")
    assert [(row.check, row.state) for row in rows] == [("parity, sampled", "OK"), ("parity, probe", "OK")]


def test_adapters_alone_agree_and_are_not_compared_over_a_quantised_base(root: Path):
    lora = {"rank": 4, "publish": "adapters"}
    rows = made(make_config(root, lora=lora), "parity")
    assert [(row.check, row.state) for row in rows] == [("parity, sampled", "OK"), ("parity, probe", "OK")]
    config = make_config(root, lora=lora | {"base_bits": 8}, weights={"parity": "off"})
    (row,) = made(config, "parity")
    assert (row.state, "frozen weights have 8 bits" in row.found) == ("skip", True)


def test_an_engine_that_ignores_the_temperature(root: Path, monkeypatch: pytest.MonkeyPatch):
    from async_rl.generator.hf import backend as hf_backend
    from async_rl.generator.hf import sampler as hf_sampler
    from async_rl.generator.hf.sampler import make_plan

    def plan_at_1(temperatures: Any, *arguments: Any, **settings: Any) -> Any:
        return make_plan(np.ones_like(temperatures), *arguments, **settings)

    for module in (hf_sampler, hf_backend):
        monkeypatch.setattr(module, "make_plan", plan_at_1)
    sampled, given = made(make_config(root, sampling={"temperature": 0.3}), "parity")
    assert (sampled.state, given.state) == ("FAIL", "FAIL")
    assert "those of 1, as if no temperature had been applied" in sampled.found
    assert "applies none" in given.found
    assert sampled.fix


def test_an_engine_with_a_stale_tensor(root: Path, monkeypatch: pytest.MonkeyPatch):
    activate = TransformersBackend.activate
    name = "model.layers.0.mlp.gate_proj.weight"

    def forgetful(self: TransformersBackend, version: int, weights: Any) -> float:
        is_first = self.version < 0
        paused_s = activate(self, version, weights)
        if is_first:
            held = dict(self._model.named_parameters())[name]
            held.data = held.data * 30
        return paused_s

    monkeypatch.setattr(TransformersBackend, "activate", forgetful)
    _, given = made(make_config(root), "parity")
    assert given.state == "FAIL"
    assert f"stale or corrupt tensors: the engine did not hold the received bytes of {name}" in given.found


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    return int(ended.value.code or 0), capsys.readouterr().out


def test_the_command_exits_1_for_a_red_row_and_2_for_a_bad_config_and_writes_nothing(
    root: Path, capsys: pytest.CaptureFixture[str], taken_port: int
):
    path = root / "run.toml"
    path.write_text(config_to_toml(make_config(root)))
    address = f"queue.address=tcp://127.0.0.1:{taken_port}"
    code, text = run_command(capsys, str(path), "--no-parity", "--json", "--set", address)
    rows = {row["check"]: row["state"] for row in json.loads(text)["rows"]}
    assert code == 1
    assert [name for name, state in rows.items() if state == "FAIL"] == ["queue.address"]
    assert (rows["gloo, two ranks"], rows["reward"], rows["template"]) == ("OK", "OK", "OK")
    assert not Path(make_config(root).run.dir).exists()
    code, text = run_command(capsys, str(path), "--no-parity", "--set", "learner.steps=3")
    assert (code, text.splitlines()[-1]) == (0, f"next: async-rl launch {path} --set learner.steps=3")
    code, _ = run_command(capsys, str(path), "--set", "queue.nonsense=1")
    assert code == 2


def test_rows_that_spell_control_tokens_are_counted_with_the_first(root: Path):
    chats = ["1 + 1 =", "say <|user|> 1", "<|user|>"]
    path = root / "spelling.jsonl"
    rows = [{"messages": [{"role": "user", "content": chat}], "gt_answer": "2"} for chat in chats]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for mode, other in (("text", "token"), ("token", "text")):
        config = make_config(root, train="spelling.jsonl", data={"special_tokens_in_content": mode})
        (row,) = [row for row in made(config, *OF_MODEL) if row.check == "special tokens"]
        assert row.state == "WARN"
        assert row.found == f"2 rows of data.train spell control tokens in a content, read as {mode} (first: row 1)"
        assert f'data.special_tokens_in_content = "{other}"' in row.fix
    assert not [row for row in made(make_config(root), *OF_MODEL) if row.check == "special tokens"]


def test_a_loss_of_the_user_s_own(root: Path, tmp_path: Path):
    assert made(make_config(root), "loss") == []
    source = tmp_path / "own_loss_of_doctor.py"
    text = (
        "import torch\n"
        "from async_rl.learner.losses.own import LossInputs, LossOutput\n"
        "def right(inputs):\n"
        "    return LossOutput(-(inputs.advantages * inputs.logprobs).sum(), torch.tensor(len(inputs.lag)))\n"
        "def wrong(inputs):\n"
        "    return LossOutput(-(inputs.advantages * inputs.logprobs).mean(), torch.tensor(1))\n"
    )
    source.write_text(text)
    (row,) = made(make_config(root, loss={"function": f"{source}:right"}), "loss")
    assert (row.check, row.state) == ("loss.function", "OK")
    row = red(made(make_config(root, loss={"function": f"{source}:wrong"}), "loss"))
    assert "expected the same loss however a step is cut" in row.found


def test_a_scorer_that_somebody_else_starts_is_looked_for_and_a_model_of_another_kind_is_found(root: Path):
    scorer = {"model": str(root / "model"), "address": free_address(), "launch": False}
    sections = {"reward": {"type": "model", "model": "judge"}, "queue": {"filter_range": []}}
    config = make_config(root, scorer={"judge": scorer}, **sections)
    (row,) = made(config, "scorers elsewhere")
    assert (row.check, row.state, "nothing listens" in row.found) == ("scorer.judge", "WARN", True)
    assert [row.state for row in made(config, *OF_REWARD)] == ["skip"]
    with RunningScorer(scorer["address"], ScriptedModel()):
        assert made(config, "scorers elsewhere") == []
    config = make_config(root, scorer={"judge": {**scorer, "launch": True}}, **sections)
    assert "one label" in red(made(config, "scorers")).found
    assert made(make_config(root), "scorers") == []


def test_the_checks_get_the_keys_that_are_switched_off(root: Path):
    config = make_config(root, queue={"filter_range": []}, loss={"dual_clip": 0})
    assert parse_config(plain(config), "copy") == config


def test_a_judge_is_not_asked_before_a_run_but_its_key_is_looked_for(root: Path, monkeypatch: pytest.MonkeyPatch):
    judge = {"endpoint": "http://127.0.0.1:1/v1", "model": "m", "api_key_env": "THE_KEY"}
    alone, extra = ({"type": "judge", "judge": judge}, {"extra": {"judge": 0.5}, "judge": judge})
    monkeypatch.delenv("THE_KEY", raising=False)
    for reward in (alone, extra):
        assert "environment variable THE_KEY" in red(made(make_config(root, reward=reward), *OF_REWARD)).found
    monkeypatch.setenv("THE_KEY", "secret")
    # It would be asked for ever, because nothing listens there.
    assert [row.state for row in made(make_config(root, reward=alone), *OF_REWARD)] == ["skip"]
    assert [row.state for row in made(make_config(root, reward=extra), *OF_REWARD)] == ["OK"]
    # Generators elsewhere have keys of their own.
    monkeypatch.delenv("THE_KEY")
    assert not made(make_config(root, reward=alone, generator={"count": 0}), "judge")


@pytest.mark.parametrize(("more", "state"), [(0, "OK"), (-1, "WARN")])
def test_memory_for_the_models_alone_is_a_warning(root: Path, monkeypatch: pytest.MonkeyPatch, more: int, state: str):
    config = make_config(root)
    monkeypatch.setattr(capacity, "has_gpu", lambda: False)
    needed = HostMemory.of(config).models + HostMemory.of(config).processes
    monkeypatch.setattr(capacity, "available_memory", lambda with_swap: needed + more)
    (found,) = made(config, "memory")
    assert found.state == state
    assert bool(found.fix) == (state == "WARN")


def test_a_queue_that_holds_fewer_groups_than_the_bound_allows_is_a_warning(root: Path):
    config = make_config(root, queue={"max_staleness": 4})
    most = settings_of(config).bytes_for_bound
    assert not [row for row in made(config, "lengths", "queue.max_bytes") if row.state != "OK"]
    low = make_config(root, queue={"max_staleness": 4, "max_bytes": max(1 << 20, most // 2)})
    many = low.model_copy(update={"learner": low.learner.model_copy(update={"groups_per_step": 64})})
    assert settings_of(many).bytes_for_bound > many.queue.max_bytes
    (found,) = (row for row in made(many, "lengths", "queue.max_bytes") if row.state == "WARN")
    assert str(settings_of(many).bytes_for_bound) in found.fix
