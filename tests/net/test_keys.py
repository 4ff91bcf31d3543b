"""Key files: who may read them, what is never replaced, who is let in."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from logging import LogRecord, getLogger
from pathlib import Path
from threading import Thread

import pytest
import zmq

from async_rl.cli.main import main
from async_rl.errors import KeyFileError
from async_rl.net.keys import (
    REMOVED_AFTER_S,
    AllowList,
    ClientKeys,
    ServerKeys,
    client_keys_of,
    make_keys,
    read_allowed,
)
from tests.clock import Clock
from tests.refusal import refusal


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_new_keys_are_for_their_owner_only_whatever_the_umask(tmp_path: Path):
    before = os.umask(0)
    try:
        with pytest.raises(SystemExit) as ended:
            main(["keys", "new", str(tmp_path / "keys"), "--client", "a", "--client", "b"])
    finally:
        os.umask(before)
    assert not ended.value.code
    assert mode(tmp_path / "keys") == 0o700
    made = ("queue.key", "client.key", "a.key", "b.key", "allowed.txt")
    assert {path.name: mode(path) for path in (tmp_path / "keys").iterdir()} == dict.fromkeys(made, 0o600)


def test_a_client_s_file_is_all_that_it_needs_and_its_key_is_let_in(tmp_path: Path):
    make_keys(tmp_path / "keys")
    client, server = ClientKeys.load(tmp_path / "keys" / "client.key"), ServerKeys.load(tmp_path / "keys")
    assert client.server == server.public
    assert zmq.curve_public(client.secret) == client.public
    assert read_allowed(server.allowed) == {client.public: "client"}
    assert client_keys_of(str(tmp_path / "keys")) == client
    assert client_keys_of(None) is None


def test_a_second_call_adds_clients_and_replaces_nothing(tmp_path: Path):
    keys = tmp_path / "keys"
    make_keys(keys)
    before = {path.name: path.read_bytes() for path in keys.glob("*.key")}
    said = make_keys(keys, ["client", "node7"])
    assert said[:2] == [f"kept {keys / 'queue.key'}", f"kept {keys / 'client.key'}"]
    assert said[2].startswith(f"made {keys / 'node7.key'}")
    assert {path.name: path.read_bytes() for path in keys.glob("*.key") if path.name != "node7.key"} == before
    assert list(read_allowed(keys / "allowed.txt").values()) == ["client", "node7"]
    # Who was shut out stays out.
    (keys / "allowed.txt").write_text("")
    assert "is not admitted" in make_keys(keys)[1]
    assert read_allowed(keys / "allowed.txt") == {}


@pytest.mark.parametrize("name", ["queue", "../up", "a b", "", ".hidden", "x" * 65])
def test_names_that_are_no_plain_file_names_are_refused(tmp_path: Path, name: str):
    with pytest.raises(KeyFileError, match="client's name"):
        make_keys(tmp_path / "keys", [name])
    assert not (tmp_path / "keys").exists()


def test_secrets_that_others_may_read_are_refused_with_the_remedy(tmp_path: Path):
    make_keys(tmp_path / "keys")
    path = tmp_path / "keys" / "client.key"
    path.chmod(0o640)
    with pytest.raises(KeyFileError, match=rf"mode 640\); run: chmod 600 {path}"):
        ClientKeys.load(path)
    (tmp_path / "keys").chmod(0o755)
    with pytest.raises(KeyFileError, match=rf"mode 755\); run: chmod 700 {tmp_path / 'keys'}"):
        make_keys(tmp_path / "keys", ["more"])


def test_the_group_may_read_secrets_of_another_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_keys(tmp_path / "keys")
    path, user = tmp_path / "keys" / "client.key", os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    path.chmod(0o440)
    ClientKeys.load(path)
    for mode in (0o444, 0o460):
        path.chmod(mode)
        with pytest.raises(KeyFileError, match=f"mode {mode:o}"):
            ClientKeys.load(path)


@dataclass
class Listed:
    """An allow-list of the clients ``a`` and ``b``, by a clock that the test moves."""

    path: Path
    a: bytes
    b: bytes
    clock: Clock
    allow: AllowList

    def are_admitted(self) -> tuple[bool, bool]:
        return self.allow.callback("async-rl", self.a), self.allow.callback("async-rl", self.b)

    def after(self, seconds: float) -> tuple[bool, bool]:
        self.clock.now += seconds
        return self.are_admitted()


@pytest.fixture
def listed(tmp_path: Path) -> Listed:
    make_keys(tmp_path / "keys", ["a", "b"])
    path, clock = tmp_path / "keys" / "allowed.txt", Clock()
    a, b = (ClientKeys.load(tmp_path / "keys" / f"{name}.key").public for name in "ab")
    made = Listed(path, a, b, clock, AllowList(path, clock))
    assert made.are_admitted() == (True, True)
    return made


def without(text: str, key: bytes) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(key.decode()))


def test_a_list_that_others_may_write_lets_nobody_in(listed: Listed):
    listed.path.chmod(0o620)
    assert listed.after(1.0) == (True, True)
    assert listed.after(REMOVED_AFTER_S) == (False, False)
    with pytest.raises(KeyFileError, match="other users may write it"):
        ServerKeys.load(listed.path.parent)
    listed.path.chmod(0o600)
    assert listed.after(1.0) == (True, True)


def test_the_list_is_read_again_when_it_changed(listed: Listed):
    make_keys(listed.path.parent, ["late"])
    late = ClientKeys.load(listed.path.parent / "late.key")
    assert listed.allow.name_of(late.public) == "late"
    listed.path.unlink()
    listed.after(1.0)
    assert listed.allow.name_of(late.public) == "late"
    listed.after(REMOVED_AFTER_S)
    assert listed.allow.name_of(late.public) is None


def test_a_key_whose_line_is_deleted_is_removed_alone_and_said(listed: Listed, caplog: pytest.LogCaptureFixture):
    text = listed.path.read_text()
    listed.path.write_text(without(text, listed.b))
    assert listed.after(1.0) == (True, True)
    assert listed.after(REMOVED_AFTER_S - 0.01) == (True, True)
    assert listed.allow.num_removed == 0
    assert listed.after(0.02) == (True, False)
    assert listed.allow.num_removed == 1
    assert f"the key of client 'b', {listed.b.decode()}, is not in {listed.path} any more" in caplog.text
    listed.path.write_text(text)
    assert listed.after(0.0) == (True, True)


def test_two_threads_that_look_at_once_remove_each_key_once(listed: Listed):
    # A second look, while the first says that a key is removed, must not remove the other key before it.
    make_keys(listed.path.parent, ["late"])
    listed.path.write_text(without(without(listed.path.read_text(), listed.a), listed.b))
    assert listed.after(1.0) == (True, True)
    looks: list[Thread] = []

    def look_too(record: LogRecord) -> bool:
        looks.append(Thread(target=listed.are_admitted))
        looks[-1].start()
        looks[-1].join(0.1)  # in vain: it waits for the first
        return True

    logger = getLogger("async_rl.net.keys")
    logger.addFilter(look_too)
    try:
        listed.clock.now += REMOVED_AFTER_S
        assert listed.allow.num_removed == 2
    finally:
        logger.removeFilter(look_too)
    for look in looks:
        look.join()
    assert (len(looks), listed.are_admitted(), listed.allow.num_removed) == (2, (False, False), 2)


@pytest.mark.parametrize("middle", ["empty", "half a line", "a part", "missing"])
def test_a_list_that_is_being_replaced_removes_nobody(listed: Listed, middle: str, caplog: pytest.LogCaptureFixture):
    text = listed.path.read_text()
    if middle == "missing":
        listed.path.unlink()
    else:
        listed.path.write_text({"empty": "", "half a line": text[:20], "a part": without(text, listed.b)}[middle])
    assert listed.after(0.5) == (True, True)
    listed.path.write_text(text)
    listed.path.chmod(0o600)
    assert listed.after(1.0) == (True, True)
    assert listed.after(10 * REMOVED_AFTER_S) == (True, True)
    assert (listed.allow.num_removed, caplog.text) == (0, "")


def test_a_mistake_in_one_line_of_a_list_in_use_costs_this_client_alone(
    listed: Listed, caplog: pytest.LogCaptureFixture
):
    text = listed.path.read_text()
    listed.path.write_text(text.replace(listed.b.decode(), listed.b.decode()[1:]))
    assert listed.after(1.0) == (True, True)
    assert listed.after(REMOVED_AFTER_S) == (True, False)
    assert "expected a public key of 40 characters and a name" in caplog.text
    listed.after(60.0)
    assert caplog.text.count("expected a public key") == 1


def test_unfit_files_are_named_and_their_secrets_are_not_shown(tmp_path: Path):
    with pytest.raises(KeyFileError, match="async-rl keys new"):
        ServerKeys.load(tmp_path)
    make_keys(tmp_path / "keys")
    path = tmp_path / "keys" / "client.key"
    secret = ClientKeys.load(path).secret.decode()
    path.write_text(path.read_text().replace("server =", "server_ ="))
    with pytest.raises(KeyFileError, match="server is missing") as caught:
        ClientKeys.load(path)
    assert secret not in str(caught.value)
    assert "secret" not in repr(ServerKeys.load(tmp_path / "keys"))
    (tmp_path / "keys" / "allowed.txt").write_text("short\n")
    with pytest.raises(KeyFileError, match=r"allowed.txt, line 1: expected a public key"):
        ServerKeys.load(tmp_path / "keys")


def test_a_lost_server_key_is_not_made_anew_beside_clients_that_trust_the_old_one(tmp_path: Path):
    make_keys(tmp_path / "keys")
    (tmp_path / "keys" / "queue.key").unlink()
    with pytest.raises(KeyFileError, match="choose another"):
        make_keys(tmp_path / "keys")


@pytest.mark.parametrize(
    "arguments", [["generator", "--connect", "tcp://10.9.8.7:5555"], ["keys", "new", "{dir}", "--client", "queue"]]
)
def test_bad_input_is_one_message_and_exit_code_2(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    said = refusal(capsys, *(argument.format(dir=tmp_path / "keys") for argument in arguments))
    assert said.startswith("async-rl: ")
    assert "--keys FILE" in said or "client's name" in said
