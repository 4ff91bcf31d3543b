"""Every kind of fault that the doctor looks for, made on purpose, is a red row with a fix; a right config has none."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from async_rl.cli.main import main
from async_rl.config.config import Config
from async_rl.config.loading import config_data, config_to_toml, parse_config
from async_rl.errors import AddressError
from async_rl.extensions.quickstart import sums
from async_rl.launch.checks import capacity, machine, node
from async_rl.launch.checks.doctor import run_in_thread
from async_rl.launch.checks.finding import Finding
from async_rl.launch.checks.table import CHECKS
from async_rl.queue.server.settings import settings_of
from async_rl.queue.storage import journal
from tests.launch.checks.made import OF_MODEL, OF_REWARD, made
from tests.learner.tiny import add_token, tiny_config, tiny_model
from tests.ports import free_address
from tests.scorer.client.scripted import RunningScorer, ScriptedModel
from tests.scorer.test_reward_model import write_reward_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and rows that are all right."""
    path = tmp_path_factory.mktemp("doctor")
    tiny_model(path / "model")
    write_rows(path / "train.jsonl", [str(2 * i) for i in range(5)])
    return path


def write_rows(path: Path, answers: Sequence[str], texts: Sequence[str] = ()) -> None:
    """A question for each answer: one of ``texts``, or a sum."""
    asked = texts or [f"{i} + {i} =" for i in range(len(answers))]
    rows = [{"messages": [{"role": "user", "content": t}], "gt_answer": a} for t, a in zip(asked, answers, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def changed_model(root: Path, name: str, **files: str | None) -> Path:
    """A copy of the model, in which files have another text, or are missing; a key is a file's name up to its dot."""
    shutil.copytree(root / "model", root / name)
    for stem, text in files.items():
        (path,) = (root / "model").glob(f"{stem}.*")
        if text is None:
            (root / name / path.name).unlink()
        else:
            (root / name / path.name).write_text(text)
    return root / name


SCORER: dict[str, Any] = {"model": "rm", "address": "tcp://127.0.0.1:5570", "backend": "vllm"}
BY_MODEL: dict[str, Any] = {"reward": {"type": "model", "model": "rm"}, "queue": {"filter_range": []}}


def make_config(root: Path, model: str = "model", train: str = "train.jsonl", **sections: Any) -> Config:
    sections["data"] = {"train": str(root / train), "system_prompt": "", **sections.get("data", {})}
    sections.setdefault("reward", {"equality": "exact"})
    sections["sampling"] = {"max_new_tokens": 24, "max_prompt_tokens": 64, **sections.get("sampling", {})}
    return tiny_config(root, model, **sections)


def red(rows: Sequence[Finding]) -> Finding:
    """The one red row; every one that is not green has a fix."""
    assert all(row.fix for row in rows if row.state in ("FAIL", "WARN"))
    (found,) = [row for row in rows if row.state == "FAIL"]
    return found


def states(rows: Sequence[Finding]) -> list[str]:
    return [row.state for row in rows]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_right_config_has_no_red_row_and_shows_the_first_prompt(root: Path):
    rows = made(make_config(root), *OF_MODEL, *OF_REWARD)
    assert set(states(rows)) == {"OK"}
    (prompt,) = [row.details for row in rows if "<|user|>" in row.details]
    assert prompt.endswith("<|assistant|>")
    assert made(make_config(root), "loss", "scorers") == []


ALONE = {"learner": {"generate": True, "generate_groups": 1, "groups_per_step": 2}, "generator": {"count": 0}}
LAUNCHED: dict[str, tuple[str, dict[str, Any]]] = {
    "parallel": ("ranks", {"parallel": {"tensor": 2}}),
    "learner.generate_groups": ("ranks", ALONE),
    "parallel.pipeline": ("parallel", {"parallel": {"pipeline": 3}, "learner": {"nproc": 3}}),
    "generator.memory": ("engine keys", {"generator": {"backend": "transformers", "memory_fraction": 0.5}}),
}


@pytest.mark.parametrize("key", LAUNCHED)
def test_what_would_stop_a_launch_is_red(root: Path, key: str):
    name, sections = LAUNCHED[key]
    row = red(made(make_config(root, **sections), name))
    assert (row.check, row.found.startswith(key)) == (name, True), row


def test_an_open_address_and_missing_keys_are_red_with_the_command_that_makes_keys(root: Path):
    for name, queue in (("queue.address", {"address": "tcp://0.0.0.0:0"}), ("keys", {"keys": str(root / "nokeys")})):
        assert "keys new" in red(made(make_config(root, queue=queue), name)).fix


def test_every_check_has_a_name_of_its_own():
    assert len({check.name for check in CHECKS}) == len(CHECKS)


# --- the machine and its peers


def peer(address: str) -> list[Finding]:
    return run_in_thread("peer", lambda: node.check_peer(address, None, insecure=False))


def test_an_address_where_nobody_or_something_else_listens(taken_port: int, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert f"nothing listens at 127.0.0.1:{port} (connection refused)" in red(peer(f"tcp://127.0.0.1:{port}")).found
    monkeypatch.setattr(node, "_ANSWER_S", 0.2)
    assert "did not answer request 'ping' within 0.2 s" in red(peer(f"tcp://127.0.0.1:{taken_port}")).found


def test_a_container_without_shared_memory_for_several_gpus_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sizes = {"docker": 64 << 20, "host": 8 << 30}
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(total=sizes[path.name]))
    for name in sizes:
        (tmp_path / name).mkdir()
    (row,) = machine.check_shared_memory(2, tmp_path / "docker")
    assert (row.state, row.found.split(";")[0]) == ("WARN", f"{tmp_path / 'docker'} has 64 MiB")
    assert not list(machine.check_shared_memory(2, tmp_path / "host"))
    assert not list(machine.check_shared_memory(1, tmp_path / "docker"))


def test_an_interface_that_does_not_exist(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert "nosuch0" in red(made(make_config(root), "interface")).found


def test_two_ranks_meet_over_loopback_and_not_on_an_address_of_another_machine():
    assert machine.check_collective("127.0.0.1", "gloo").state == "OK"
    with pytest.raises(AddressError, match="assign"):
        machine.check_collective("192.0.2.1", "gloo")


def test_a_network_file_system_and_a_full_disk(root: Path, monkeypatch: pytest.MonkeyPatch):
    disk = ("run.dir", "model", "disk")
    assert states(made(make_config(root), *disk)[1:]) == ["OK", "OK"]
    monkeypatch.setattr(journal, "file_system_at", lambda path: "nfs4")
    assert red(made(make_config(root), *disk)[1:]).found.startswith("queue.journal_dir: ")
    monkeypatch.setattr(journal, "file_system_at", lambda path: "ext4")
    monkeypatch.setattr(capacity, "free_bytes", lambda path: 1000)
    row = red(made(make_config(root), *disk)[1:])
    assert (row.check, "no room for one" in row.found) == ("run.dir", True)


@pytest.mark.parametrize(("more", "state"), [(0, "OK"), (-1, "WARN")])
def test_memory_for_the_models_alone_is_a_warning(root: Path, monkeypatch: pytest.MonkeyPatch, more: int, state: str):
    config = make_config(root)
    monkeypatch.setattr(capacity, "has_gpu", lambda: False)
    needed = sum(capacity.host_bytes(config, "cpu"))
    monkeypatch.setattr(capacity, "available_memory", lambda with_swap: needed + more)
    (found,) = made(config, "memory")
    assert (found.state, bool(found.fix)) == (state, state == "WARN")


def test_packages_that_are_too_old_or_missing_are_named_also_by_a_checkout_that_is_not_installed(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    def requires(package: str) -> list[str]:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(machine, "package_versions", lambda: {"python": "3.11", "torch": "2.9", "pyzmq": "27.0"})
    config = make_config(root, generator={"backend": "vllm"})
    rows = made(config, "versions", "engines")
    assert {row.check: row.state for row in rows} == {
        "python": "OK", "torch": "WARN", "transformers": "FAIL", "pyzmq": "OK", "vllm": "FAIL",
    }  # fmt: skip
    assert "2.9, async-rl requires " in "".join(row.found for row in rows)
    monkeypatch.setattr(machine, "requires", requires)
    assert made(config, "versions", "engines") == rows


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
    assert (row.check, row.state, key in row.found) == ("vllm", state, True)


# --- the model and its data


def test_a_model_that_can_not_be_the_policy(root: Path):
    changed_model(root, "bare", tokenizer=None)
    changed_model(root, "odd", chat_template="{{ raise_exception('no user here') }}")
    write_reward_model(root / "judge", tie_word_embeddings=True)
    for name, check, words in (
        ("bare", "template", "tokenizer"),
        ("odd", "template", "no user here"),
        ("judge", "model", "got Qwen2ForSequenceClassification"),
    ):
        row = red(made(make_config(root, name), *OF_MODEL))
        assert (row.check, words in row.found) == (check, True), row


def test_the_tokens_that_end_a_turn_are_listed_with_the_reason(root: Path):
    template = "{% for m in messages %}{{ m['content'] }}END{% endfor %}"
    changed_model(root, "unlisted", chat_template=template.replace("END", "<|user|>"))
    row = made(make_config(root, "unlisted"), *OF_MODEL)[2]
    assert (row.check, row.state) == ("end of turn", "OK")
    assert "<|user|> (2: the chat template writes it after an answer)" in row.found
    assert "the tokenizer's eos_token" in row.found
    changed_model(root, "endless", chat_template=template.replace("END", ""))
    row = made(make_config(root, "endless"), *OF_MODEL)[2]
    assert (row.state, "writes no end token" in row.found) == ("WARN", True)


def test_text_that_the_tokenizer_does_not_know(root: Path):
    sums.write_model(root / "digits", seed=0)  # it knows digits, a few signs, and the letters of \\boxed
    write_rows(root / "letters.jsonl", ["3", "3"], ["1+2=", "who 12"])
    (row,) = made(make_config(root, "digits", train="letters.jsonl"), "tokenizer")
    assert (row.check, row.state) == ("tokenizer", "WARN")
    assert "2 of 10 tokens of the first 2 prompts are unknown to it ('?')" in row.found  # w and h
    assert made(make_config(root, "digits"), "tokenizer")[0].state == "OK"


def test_a_token_of_the_data_that_the_embedding_has_no_row_for(root: Path):
    add_token(tiny_model(root / "grown"), "<new>")
    _, row, *_ = made(make_config(root, "grown"), *OF_MODEL)
    assert (row.state, "46 tokens, 1 of them without a row in the model's embedding" in row.found) == ("OK", True)
    write_rows(root / "new.jsonl", ["3", "3"], ["1+2=", "2+<new>"])
    for data in ({"train": str(root / "new.jsonl")}, {"eval": {"new": str(root / "new.jsonl")}}):
        row = red(made(make_config(root, "grown", data=data), *OF_MODEL))
        assert (row.check, "embedding of 45 rows has a row for, got <new> (45)" in row.found) == ("tokenizer", True)


def test_an_end_token_that_lora_cant_teach(root: Path):
    path = changed_model(root, "untrained") / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][0] = 0
    save_file(weights, path, {"format": "pt"})
    assert made(make_config(root, "untrained"), "lora.rank") == []
    (row,) = made(make_config(root, "untrained", lora={"rank": 2}), "lora.rank")
    assert (row.state, "<|end|> (0), which ends an answer, was never trained" in row.found) == ("WARN", True)


def test_rows_that_spell_control_tokens_are_counted_with_the_first(root: Path):
    write_rows(root / "spelling.jsonl", ["2"] * 3, ["1 + 1 =", "say <|user|> 1", "<|user|>"])
    for mode, other in (("text", "token"), ("token", "text")):
        config = make_config(root, train="spelling.jsonl", data={"special_tokens_in_content": mode})
        (row,) = [row for row in made(config, *OF_MODEL) if row.check == "special tokens"]
        assert row.state == "WARN"
        assert row.found == f"2 rows of data.train spell control tokens in a content, read as {mode} (first: row 1)"
        assert f'data.special_tokens_in_content = "{other}"' in row.fix


def test_data_that_is_missing_bad_or_says_nothing(root: Path):
    assert red(made(make_config(root, train="none.jsonl"), "data")).found.startswith("data.train: ")
    (root / "bad.jsonl").write_text('{"messages": 3}\n')
    row = red(made(make_config(root, data={"eval": {"held": str(root / "bad.jsonl")}}), "data"))
    assert (row.found.startswith("data.eval.held: "), "bad.jsonl:1" in row.found) == (True, True)
    write_rows(root / "proofs.jsonl", ["4", "proof", "5", "notfound"])
    row = red(made(make_config(root, train="proofs.jsonl", reward={"type": "boxed"}), "data"))
    assert "gt_answer: expected an answer that can be compared, got the text 'proof'" in row.message
    assert "(2 of 4 rows have errors)" in row.message


def test_a_queue_that_holds_fewer_groups_than_the_bound_allows_is_a_warning(root: Path):
    config = make_config(root, queue={"max_staleness": 4})
    most = settings_of(config).bytes_for_bound
    assert not [row for row in made(config, "lengths", "queue.max_bytes") if row.state != "OK"]
    low = make_config(root, queue={"max_staleness": 4, "max_bytes": max(1 << 20, most // 2)})
    many = low.model_copy(update={"learner": low.learner.model_copy(update={"groups_per_step": 64})})
    (found,) = (row for row in made(many, "lengths", "queue.max_bytes") if row.state == "WARN")
    assert str(settings_of(many).bytes_for_bound) in found.fix


# --- rewards and losses


def test_a_reward_that_grades_wrongly(root: Path):
    write_rows(root / "braces.jsonl", ["1", "}{"])  # a box that is closed too early by the answer itself
    row = red(made(make_config(root, train="braces.jsonl"), *OF_REWARD))
    assert (row.check, "rejects the right answer" in row.found) == ("reward", True)
    source = root / "generous.py"
    source.write_text("def reward(item):\n    return 1.0\n")
    reward = {"type": f"{source}:reward"}
    config = make_config(root, reward=reward, generator={"allow_code": [str(source)]})
    assert "accepts a wrong answer" in red(made(config, *OF_REWARD)).found
    assert "allow_code" in red(made(make_config(root, reward=reward), *OF_REWARD)).fix


def test_the_row_s_answer_is_shown_as_the_reward_reads_it(root: Path):
    write_rows(root / "golds.jsonl", ["2 + 2 = 4\n#### 72", r"so it is $\boxed{5}$.", r"$\frac{1}{2}$"])
    (row,) = made(make_config(root, train="golds.jsonl", reward={"type": "boxed"}), *OF_REWARD)
    assert (row.state, r"it reads the rows' answers as '72', '5', '\\frac{1}{2}'" in row.found) == ("OK", True)


def test_a_scorer_that_somebody_else_starts_is_looked_for_and_a_model_of_another_kind_is_found(root: Path):
    scorer = {"model": str(root / "model"), "address": free_address(), "launch": False}
    sections = {"reward": {"type": "model", "model": "judge"}, "queue": {"filter_range": []}}
    config = make_config(root, scorer={"judge": scorer}, **sections)
    (row,) = made(config, "scorers elsewhere")
    assert (row.check, row.state, "nothing listens" in row.found) == ("scorer.judge", "WARN", True)
    assert states(made(config, *OF_REWARD)) == ["skip"]
    here = make_config(root, scorer={"judge": {**scorer, "launch": True}}, **sections)
    with RunningScorer(scorer["address"], ScriptedModel()):
        assert made(config, "scorers elsewhere") == []
        assert "scorer.judge.address: can't bind" in red(made(here, "scorers")).message
    assert "one label" in red(made(here, "scorers")).found
    away = make_config(
        root, scorer={"judge": {**scorer, "launch": True, "address": "tcp://192.0.2.1:5570"}}, **sections
    )
    assert "not authenticated" in red(made(away, "scorers")).message


def test_a_judge_is_not_asked_before_a_run_but_its_key_is_looked_for(root: Path, monkeypatch: pytest.MonkeyPatch):
    judge = {"endpoint": "http://127.0.0.1:1/v1", "model": "m", "api_key_env": "THE_KEY"}
    alone, extra = ({"type": "judge", "judge": judge}, {"extra": {"judge": 0.5}, "judge": judge})
    monkeypatch.delenv("THE_KEY", raising=False)
    for reward in (alone, extra):
        assert "environment variable THE_KEY" in red(made(make_config(root, reward=reward), *OF_REWARD)).found
    # Generators elsewhere have keys of their own.
    assert not made(make_config(root, reward=alone, generator={"count": 0}), "judge")
    monkeypatch.setenv("THE_KEY", "secret")
    # It would be asked for ever, because nothing listens there.
    assert states(made(make_config(root, reward=alone), *OF_REWARD)) == ["skip"]
    assert states(made(make_config(root, reward=extra), *OF_REWARD)) == ["OK"]


# --- engine and learner


@pytest.mark.parametrize(
    "sections",
    [{}, {"sampling": {"temperature": 0.7, "top_k": 5, "top_p": 0.9}}, {"lora": {"rank": 4, "publish": "adapters"}}],
    ids=["as it is", "truncated sampling", "adapters"],
)
def test_engine_and_learner_agree_about_a_right_model(root: Path, sections: dict[str, Any]):
    rows = made(make_config(root, **sections), "parity")
    assert [(row.check, row.state) for row in rows] == [("parity, sampled", "OK"), ("parity, probe", "OK")]


def test_adapters_over_a_quantised_base_are_not_compared(root: Path):
    lora = {"rank": 4, "publish": "adapters", "base_bits": 8}
    (row,) = made(make_config(root, lora=lora, weights={"parity": "off"}), "parity")
    assert (row.state, "frozen weights have 8 bits" in row.found) == ("skip", True)


def test_the_checks_get_the_keys_that_are_switched_off(root: Path):
    config = make_config(root, queue={"filter_range": []}, loss={"dual_clip": 0})
    assert parse_config(config_data(config), "copy") == config


def test_the_command_exits_1_for_a_red_row_and_2_for_a_bad_config_and_writes_nothing(
    root: Path, capsys: pytest.CaptureFixture[str], taken_port: int
):
    def doctor(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *arguments])
        return int(ended.value.code or 0), capsys.readouterr().out

    path = root / "run.toml"
    path.write_text(config_to_toml(make_config(root)))
    address = f"queue.address=tcp://127.0.0.1:{taken_port}"
    code, text = doctor(str(path), "--no-parity", "--json", "--set", address)
    rows = {row["check"]: row["state"] for row in json.loads(text)["rows"]}
    assert code == 1
    assert [name for name, state in rows.items() if state == "FAIL"] == ["queue.address"]
    assert (rows["gloo, two ranks"], rows["reward"], rows["template"]) == ("OK", "OK", "OK")
    assert not Path(make_config(root).run.dir).exists()
    code, text = doctor(str(path), "--no-parity", "--set", "learner.steps=3")
    assert (code, text.splitlines()[-1]) == (0, f"next: async-rl launch {path} --set learner.steps=3")
    assert doctor(str(path), "--set", "queue.nonsense=1")[0] == 2
