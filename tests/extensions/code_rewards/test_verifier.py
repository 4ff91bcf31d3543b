"""The verifier's server and its client, over real sockets; and what is made of verifiers that fail."""

import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from async_rl.config.reward import CodeRewardConfig
from async_rl.errors import AddressError, ConfigError, SandboxError, SandboxFailedError
from async_rl.extensions.code_rewards import verifier
from async_rl.extensions.code_rewards.row_tests import CodeTests, parse_tests
from async_rl.extensions.code_rewards.verifier import PATH, RemoteJudge, VerifierServer, serve
from tests.rewards.served_judge import Answer, Judge

SERVER = CodeRewardConfig(time_limit_s=5.0, packages=(), workers=2)
SCRIPT = parse_tests({"test_cases": {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2\n", "4\n", "6\n"]}})
CALL = parse_tests({"test_cases": {"inputs": ['["a", "b"]'], "outputs": ['"ab"'], "fn_name": "join"}})


@contextmanager
def serving(server: VerifierServer | ThreadingHTTPServer) -> Iterator[str]:
    """Serve in a thread. Yield the URL."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with closing(VerifierServer(("127.0.0.1", 0), SERVER)) as server, serving(server) as url:
        yield url


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """A verifier of somebody else's."""
    with Judge(answer) as server, serving(server) as url:
        yield url


def judge(endpoint: str, **code: Any) -> RemoteJudge:
    return RemoteJudge(CodeRewardConfig(endpoint=endpoint, **code), pause_s=0.0)


@pytest.mark.parametrize(
    ("source", "tests", "verdicts"),
    [
        ("print(2 * int(input()))", SCRIPT, ("passed", "passed", "passed")),
        ("print(2)", SCRIPT, ("passed", "wrong", "not_run")),
        ("print(", SCRIPT, ("unusable", "not_run", "not_run")),
        ("def join(parts): return ''.join(parts)", CALL, ("passed",)),
    ],
)
def test_verdicts_come_back_over_the_network(endpoint: str, source: str, tests: CodeTests, verdicts: tuple[str, ...]):
    assert judge(endpoint).judge(source, tests).verdicts == verdicts


def test_the_asker_says_how_to_judge_and_for_how_long(endpoint: str):
    asker = judge(endpoint, partial_credit=True, time_limit_s=0.5)
    source = "n = int(input())\nwhile n == 2: pass\nprint(2 * n)"
    assert asker.judge(source, SCRIPT).verdicts == ("passed", "failed", "passed")  # -1 has no cause


def post(endpoint: str, body: bytes, path: str = PATH) -> tuple[int, Any]:
    request = urllib.request.Request(endpoint + path, body, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_the_predecessors_own_request_is_answered(endpoint: str):
    in_outs = {"inputs": ["1\n", "2\n"], "outputs": ["1\n", "x\n"]}
    request = {"in_outs": in_outs, "generation": "print(input())", "timeout": 10, "debug": False}
    status, answer = post(endpoint, json.dumps(request).encode())
    assert (status, answer["result"]) == (200, [True, False])
    assert [note["verdict"] for note in answer["metadata"]] == ["passed", "wrong"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" * 100_000, "recursion"),
        (b"[]", "expected"),
        (b'{"generation": "x", "in_outs": {"inputs": [], "outputs": []}}', "two lists of equal length"),
        (b'{"generation": "x", "in_outs": {"inputs": ["1"], "outputs": ["1"]}, "settings": {"compare": 1}}', "compare"),
    ],
)  # fmt: skip
def test_a_malformed_request_is_told_what_was_expected(endpoint: str, body: bytes, message: str):
    code, answer = post(endpoint, body)
    assert code == 400
    assert message in answer["error"]
    assert post(endpoint, body, "/other")[0] == 404


@pytest.mark.parametrize(
    ("header", "status"), [("Origin: http://evil.example", 403), (f"Content-Length: {'9' * 5000}", 413)]
)
def test_web_pages_and_absurd_lengths_are_refused(endpoint: str, header: str, status: int):
    host, port = endpoint.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"POST {PATH} HTTP/1.1\r\n{header}\r\n\r\n".encode())
        assert connection.makefile().readline().split()[1] == str(status)


def test_connections_that_send_nothing_do_not_pile_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verifier, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(verifier, "_REQUEST_S", 1.0)
    with closing(VerifierServer(("127.0.0.1", 0), SERVER)) as server, serving(server) as url, ExitStack() as opened:
        peers = [
            opened.enter_context(socket.create_connection(("127.0.0.1", server.server_port), 30)) for _ in range(6)
        ]
        # Whatever trickles in: three are closed at once, the others when their request has not come in time.
        for peer in peers:
            with contextlib.suppress(ConnectionError):
                peer.sendall(b"P")
        for peer in peers:
            with contextlib.suppress(ConnectionError):
                while peer.recv(1000):
                    pass
        # A connection is closed just before it is counted as ended.
        for _ in range(3):
            assert server._connections.acquire(timeout=30)
        for _ in range(3):
            server._connections.release()
        assert judge(url).judge("print(input())", SCRIPT).verdicts


@pytest.mark.parametrize(
    ("status", "answer", "told"),
    [
        (500, {"error": "unknown argument"}, "got none: HTTP 500.*unknown argument"),
        (200, {"result": [True]}, ""), (200, {"result": []}, ""), (200, {"result": [True] * 4}, ""),
        (200, {"result": ["yes"] * 3}, ""), (200, {}, ""), (200, [], ""), (200, b"no JSON", ""),
    ],
)  # fmt: skip
def test_a_verifier_that_fails_or_makes_no_sense_is_never_a_verdict(status: int, answer: Any, told: str):
    spoiled = False

    def respond(request: dict[str, Any]) -> tuple[int, Any]:
        return (status, answer) if spoiled else (200, {"result": ["1" in request["generation"]]})

    with answering(respond) as endpoint:
        remote = judge(endpoint)
        spoiled = True
        with pytest.raises(SandboxFailedError, match=told or None):
            remote.judge("print(1)", SCRIPT)


def test_a_verifier_that_can_not_be_reached_or_passes_everything_is_refused_at_the_start():
    unfit = pytest.raises(SandboxError, match=r"reward\.code\.endpoint: .* got them accepted and accepted; set the key")
    with answering(lambda _: (200, {"result": [True]})) as endpoint, unfit:
        judge(endpoint)
    with pytest.raises(SandboxError, match=r"reward\.code\.endpoint: .* check that `async-rl verifier` runs there"):
        judge(endpoint)  # it is gone


def test_a_verifier_open_to_the_network_or_with_other_settings_is_refused():
    with pytest.raises(AddressError, match="--insecure on a trusted network"):
        serve("0.0.0.0:0", [], insecure=False)
    with pytest.raises(ConfigError, match=r"takes only reward\.code\.\* keys"):
        serve("127.0.0.1:0", ["learner.steps=3"], insecure=False)
    with pytest.raises(ConfigError, match=r"reward\.code\.worker: unknown key"):
        serve("127.0.0.1:0", ["reward.code.worker=3"], insecure=False)
    with pytest.raises(ValueError, match="expected an address like http://"):
        CodeRewardConfig(endpoint="10.0.0.1:8000")
