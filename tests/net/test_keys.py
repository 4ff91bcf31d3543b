"""Key files: who may read them, what is never replaced, who is let in."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq

from async_rl.cli.main import main
from async_rl.errors import KeyFileError
from async_rl.net.keys import AllowList, ClientKeys, ServerKeys, client_keys_of, make_keys, read_allowed
from tests.refusal import refusal


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_new_keys_are_for_their_owner_only_whatever_the_umask(tmp_path: Path):
    before = os.umask(0)
    try:
        make_keys(tmp_path / "keys", ["a", "b"])
    finally:
        os.umask(before)
    assert mode(tmp_path / "keys") == 0o700
    assert {path.name: mode(path) for path in (tmp_path / "keys").iterdir()} == {
        "queue.key": 0o600,
        "client.key": 0o600,
        "a.key": 0o600,
        "b.key": 0o600,
        "allowed.txt": 0o600,
    }


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


def test_a_client_that_was_shut_out_stays_out(tmp_path: Path):
    make_keys(tmp_path / "keys")
    (tmp_path / "keys" / "allowed.txt").write_text("")
    assert "is not admitted" in make_keys(tmp_path / "keys")[1]
    assert read_allowed(tmp_path / "keys" / "allowed.txt") == {}


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


def test_a_list_that_others_may_write_lets_nobody_in(tmp_path: Path):
    make_keys(tmp_path / "keys")
    path = tmp_path / "keys" / "allowed.txt"
    client = ClientKeys.load(tmp_path / "keys" / "client.key")
    allow = AllowList(path)
    assert allow.callback("async-rl", client.public)
    path.chmod(0o620)
    os.utime(path, (1, 1))
    assert not allow.callback("async-rl", client.public)
    with pytest.raises(KeyFileError, match="other users may write it"):
        ServerKeys.load(tmp_path / "keys")


def test_the_list_is_read_again_when_it_changed(tmp_path: Path):
    make_keys(tmp_path / "keys")
    allow = AllowList(tmp_path / "keys" / "allowed.txt")
    make_keys(tmp_path / "keys", ["late"])
    late = ClientKeys.load(tmp_path / "keys" / "late.key")
    assert allow.name_of(late.public) == "late"
    (tmp_path / "keys" / "allowed.txt").unlink()
    assert allow.name_of(late.public) is None


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


def test_the_command_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["keys", "new", str(tmp_path / "keys"), "--client", "a", "--client", "b"])
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    made = [f"made {tmp_path / 'keys' / name}.key" for name in ("queue", "client", "a", "b")]
    assert [line.split(":")[0] for line in lines] == made


@pytest.mark.parametrize(
    "arguments",
    [["generator", "--connect", "tcp://10.9.8.7:5555"], ["keys", "new", "{dir}", "--client", "queue"]],
)
def test_bad_input_is_one_message_and_exit_code_2(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    said = refusal(capsys, *(argument.format(dir=tmp_path / "keys") for argument in arguments))
    assert said.startswith("async-rl: ")
    assert "--keys FILE" in said or "client's name" in said
