"""Mutated and replayed requests at the verifier's port: each gets an HTTP answer or none, and it goes on judging."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import random
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest

from async_rl.config.reward import CodeRewardConfig
from async_rl.extensions.code_rewards import verifier as verifier_module
from async_rl.extensions.code_rewards.reward import Judgement, Verdict, judgement_of
from async_rl.extensions.code_rewards.row_tests import CodeTests, parse_tests
from async_rl.extensions.code_rewards.verifier import PATH, RemoteJudge, VerifierServer
from tests.forked import Forked, preload
from tests.fuzz import CHUNK, FEW, byte_mutants, chunk_rng, long_chunks

preload("async_rl.extensions.code_rewards.verifier")

DEADLINE_S = 20.0
MAX_GROWTH_BYTES = 64 << 20
TESTS = parse_tests({"test_cases": {"inputs": ["1\n"], "outputs": ["1\n"]}})
_LEAVES: tuple[Any, ...] = (
    None, True, 0, -1, 1e308, 2**70, "", "x" * 3000, [], {}, [[]] * 50, [None], {"a": {"b": []}}, "\ud800", ["1", 2],
)  # fmt: skip


class PassesOnes:
    """A judge without a sandbox: a program with a 1 passes."""

    def judge(self, source: str, tests: CodeTests) -> Judgement:
        verdicts: list[Verdict] = ["passed" if "1" in source else "wrong" for _ in tests.tests]
        return judgement_of(verdicts, [], len(tests.tests))

    def close(self) -> None:
        pass


def run_verifier(pipe: Connection) -> None:
    verifier_module.sandbox_of = lambda code: PassesOnes()  # type: ignore[assignment]
    verifier_module.LocalJudge = lambda sandbox, code: sandbox  # type: ignore[assignment]
    server = VerifierServer(("127.0.0.1", 0), CodeRewardConfig(packages=()))
    pipe.send(server.server_port)
    server.serve_forever()


@contextmanager
def verifier() -> Iterator[tuple[int, int]]:
    """Its port and its process."""
    ours, theirs = Pipe()
    process = Forked(run_verifier, theirs)
    try:
        assert ours.poll(DEADLINE_S), process.communicate()
        yield int(ours.recv()), process.pid
        assert process.poll() is None
    finally:
        process.kill()
        _, log = process.communicate()
    assert "Traceback" not in log, log[-3000:]


def requests() -> list[bytes]:
    script = {"inputs": ["1\n", "2\n"], "outputs": ["1\n", "2\n"], "tolerance": 1e-6}
    call = {"inputs": [["a"]], "outputs": ['"a"'], "fn_name": "first"}
    settings = {"total_timeout": 9.0, "all_tests": True, "compare": "tokens", "prelude": "calls"}
    return [
        _posted({"in_outs": in_outs, "generation": "print(1)", "timeout": 5.0, "debug": False, "settings": settings})
        for in_outs in (script, call)
    ]


def _posted(request: Any) -> bytes:
    body = json.dumps(request).encode()
    return f"POST {PATH} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def field_mutant(rng: random.Random, request: bytes) -> bytes:
    """The request with another value somewhere in its JSON, and the right length."""
    plain = json.loads(request.partition(b"\r\n\r\n")[2])
    for _ in range(rng.choice((1, 1, 3))):
        container = plain
        while True:
            keys = list(container) if isinstance(container, dict) else list(range(len(container)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(container[key], dict | list) and rng.random() < 0.7:
                container = container[key]
                continue
            container[key] = copy.deepcopy(rng.choice(_LEAVES))
            break
    return _posted(plain)


def answer_to(port: int, request: bytes) -> bytes:
    received = b""
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
        with contextlib.suppress(OSError):  # the server may have answered and closed already
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while chunk := connection.recv(1 << 16):
                received += chunk
    return received


def fuzz(chunks: Sequence[int], size: int = CHUNK) -> None:
    valid, num_sent, num_judged, growth = requests(), 0, 0, 0
    with verifier() as (port, pid):
        judge = RemoteJudge(CodeRewardConfig(endpoint=f"http://127.0.0.1:{port}"))
        for number, chunk in enumerate(chunks):
            rng = chunk_rng(chunk)
            for mutant in itertools.islice(byte_mutants(rng, valid), size):
                request = mutant if rng.random() < 0.5 else field_mutant(rng, rng.choice(valid))
                answer = answer_to(port, request)
                num_sent += 1
                num_judged += answer.startswith(b"HTTP/1.0 200")
                # Python answers HTTP/0.9 without a status line.
                assert not answer or re.match(rb"HTTP/1\.0 (200|400|403|404|413|414|431|501|505) |<!DOCTYPE", answer)
            assert judge.judge("print(1)", TESTS).all_passed, f"chunk {chunk}"
            if number == 0:
                growth = -psutil.Process(pid).memory_info().rss
        growth += psutil.Process(pid).memory_info().rss
    print(f"{num_sent} requests, {num_judged} judged; memory grew by {growth / 2**20:.1f} MiB")
    assert num_judged > 0.05 * num_sent
    assert growth < MAX_GROWTH_BYTES


def test_mutated_and_replayed_requests_leave_the_verifier_judging():
    fuzz([0], FEW)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_many_mutants_leave_the_verifier_judging(pytestconfig: pytest.Config):
    fuzz(long_chunks(pytestconfig))
