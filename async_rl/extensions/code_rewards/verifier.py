"""Runs programs on another machine, over HTTP. ``RemoteJudge`` is the client, and ``VerifierServer`` is the server.

``async-rl verifier`` starts the server, for generators on machines that can't isolate programs. It speaks plain HTTP
without authentication, so it is meant for loopback or a trusted network. Every client that reaches it can run programs
in its sandbox.

The protocol is Colossal-RL's, so the client or the server may also be Colossal-RL's. A request is a POST to
``/check_correctness`` with ``{"in_outs", "generation", "timeout", "debug"}``. The answer's ``result`` is a list with a
code for each test that was run: true, false, -1 (failed or timed out) or -2 (unusable). Our requests also have
``settings``, which other verifiers ignore.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from async_rl.config.loading import apply_override, parse_config
from async_rl.config.reward import CodeRewardConfig
from async_rl.errors import AddressError, ConfigError, RewardError, SandboxError, SandboxFailedError
from async_rl.extensions.code_rewards.reward import Judgement, LocalJudge, Verdict, judgement_of, sandbox_of
from async_rl.extensions.code_rewards.row_tests import CodeTest, CodeTests, parse_tests
from async_rl.net.address import check_address, is_loopback
from async_rl.net.streams import UnauthenticatedPeers, is_out_of_resources, raise_descriptor_limit, shut_down

PATH = "/check_correctness"
CODES: dict[str, bool | int] = {"passed": True, "wrong": False, "failed": -1, "timed_out": -1, "unusable": -2}

TOTAL_LIMIT_S = 600.0
"""Time limit in seconds for one program: for all its tests and the wait for a free worker. Colossal-RL's value."""

_ATTEMPTS = 3
_PAUSE_S = 1.0
_LARGEST_ANSWER_BYTES = 16 << 20

MAX_REQUEST_BYTES = 64 << 20
MAX_CONNECTIONS = 256
"""Maximum number of open connections. Each needs a thread and up to ``MAX_REQUEST_BYTES`` of memory, so further ones
are closed at once. Only half of the connections may have incomplete requests. Beyond that, a new connection replaces
the oldest one with an incomplete request, so that slow clients can't block others."""
_LENGTH = re.compile(r"[0-9]{1,12}")
_SOCKET_TIMEOUT_S = 60.0
_REQUEST_S = 120.0
"""Time limit in seconds from the start of a connection to the end of its request."""
_ROOM_S = 1.0
"""Seconds for which a new connection waits until the thread of a replaced connection has ended."""
_FULL_S = 0.1
"""Seconds until the server accepts connections again after it ran out of file descriptors."""

logger = logging.getLogger(__name__)


class RemoteJudge:
    """Lets the verifier at ``reward.code.endpoint`` run programs and judge their outputs.

    When a RemoteJudge is created, it checks the verifier with a right and a wrong program.

    Raises:
        SandboxError: the verifier can't be reached, or gives a wrong verdict on one of the two programs.
    """

    def __init__(self, code: CodeRewardConfig, *, pause_s: float = _PAUSE_S) -> None:
        assert code.endpoint is not None
        self._url = code.endpoint.rstrip("/") + ("" if code.endpoint.rstrip("/").endswith(PATH) else PATH)
        self._timeout_s = code.time_limit_s
        self._settings = {
            "total_timeout": code.total_time_limit_s, "all_tests": code.partial_credit, "compare": code.compare,
            "prelude": code.prelude,
        }  # fmt: skip
        self._pause_s = pause_s
        self._check()

    def judge(self, source: str, tests: CodeTests) -> Judgement:
        in_outs: dict[str, Any] = {
            "inputs": [test.given if tests.function is None else json.loads(test.given) for test in tests.tests],
            "outputs": [test.expected if tests.function is None else json.dumps(test.expected) for test in tests.tests],
            "tolerance": tests.tolerance,
        }
        if tests.check is not None:
            in_outs = {"check": tests.check.tests, "setup": tests.check.setup}
        if tests.function is not None:
            in_outs["fn_name"] = tests.function
        request = {"in_outs": in_outs, "generation": source, "timeout": self._timeout_s, "debug": False}
        answer = self._ask({**request, "settings": self._settings})
        return _judgement(answer, len(tests.tests), self._url)

    def close(self) -> None:
        """Do nothing: no connection stays open."""

    def _check(self) -> None:
        tests = CodeTests((CodeTest("", "1\n"),), None)
        try:
            right, wrong = (self.judge(source, tests).all_passed for source in ("print(1)", "print(2)"))
        except SandboxFailedError as error:
            raise SandboxError(f"reward.code.endpoint: {error}") from error
        if wrong or not right:
            words = ["accepted" if is_accepted else "rejected" for is_accepted in (right, wrong)]
            raise SandboxError(
                f"reward.code.endpoint: the service at {self._url} failed a test: where the output 1 is right, "
                f"expected the program print(1) accepted and print(2) rejected, got them {words[0]} and {words[1]}; "
                f"set the key to the address of an `async-rl verifier`"
            )

    def _ask(self, request: dict[str, Any]) -> Any:
        """Send ``request`` to the verifier and return the answer's JSON. Try again if the verifier is not available.

        Raises:
            SandboxFailedError: the verifier gave no answer. This says nothing about the program.
        """
        body = json.dumps(request).encode()
        deadline_s = time.monotonic() + TOTAL_LIMIT_S
        trouble = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(self._pause_s)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            post = urllib.request.Request(self._url, body, {"Content-Type": "application/json"}, method="POST")
            try:
                with urllib.request.urlopen(post, timeout=left_s) as answer:
                    return json.loads(answer.read(_LARGEST_ANSWER_BYTES))
            except urllib.error.HTTPError as error:
                trouble = f"HTTP {error.code} {error.reason}: {error.read(500).decode(errors='replace')}"
                if error.code < 500:
                    break
            except (OSError, ValueError) as error:
                trouble = str(error)
        raise SandboxFailedError(
            f"expected verdicts from the verifier at {self._url}, got none: {trouble or 'no time left'}; check that "
            f"`async-rl verifier` runs there, and see its log"
        )


def _judgement(answer: Any, num_tests: int, url: str) -> Judgement:
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list) or not 1 <= len(result) <= num_tests or not all(_is_code(code) for code in result):
        raise SandboxFailedError(
            f'expected {{"result": [...]}} from the verifier at {url}, with 1 to {num_tests} entries that are true, '
            f"false, -1 or -2, got {json.dumps(answer)[:200]}; set reward.code.endpoint to the address of an "
            f"`async-rl verifier`"
        )
    codes: list[Verdict] = ["passed" if code in (True, 1) else _VERDICT_OF[int(code)] for code in result]
    missing = num_tests - len(codes)
    if missing and all(verdict == "passed" for verdict in codes):
        raise SandboxFailedError(
            f"expected verdicts on {num_tests} tests, or up to the first that fails, from the verifier at {url}, got "
            f"only {len(codes)}, all passed; set reward.code.endpoint to the address of an `async-rl verifier`"
        )
    return judgement_of(codes, [], num_tests)


_VERDICT_OF: dict[int, Verdict] = {0: "wrong", -1: "failed", -2: "unusable"}


def _is_code(code: Any) -> bool:
    return isinstance(code, int) and code in (1, 0, -1, -2)


class VerifierServer(ThreadingHTTPServer):
    """The HTTP server of ``async-rl verifier``. It runs programs in this machine's sandbox and answers with verdicts.

    Each connection has a thread, and at most ``code.num_workers`` programs run at a time. ``close`` is called once.

    Args:
        address: host and port to bind. For port 0 the system chooses a free port, which is in ``server_address``.
        code: the limits and packages of this machine. A request can shorten the time limits and choose how outputs are
            compared.

    Raises:
        SandboxError: this machine can't isolate programs.
        OSError: the address can't be bound.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], code: CodeRewardConfig) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self._code = code
        self._sandbox = sandbox_of(code)
        self._free = threading.BoundedSemaphore(code.num_workers)
        most = min(MAX_CONNECTIONS, raise_descriptor_limit() // 4)
        self._connections = threading.BoundedSemaphore(most)
        self._reading_lock = threading.Lock()
        self._reading: UnauthenticatedPeers[socket.socket] = UnauthenticatedPeers(
            most=max(1, most // 2), most_of_address=max(1, most // 4)
        )

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if is_out_of_resources(error):
                # The connection is still in the queue: without a pause the server would ask for it again at once.
                logger.warning(
                    "the verifier can't accept a connection now: %s; raise the limit on open files (ulimit -n)", error
                )
                time.sleep(_FULL_S)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._reading_lock:
            ended = self._reading.add(request, client_address[0], time.monotonic())
        for other in ended:
            shut_down(other)  # its thread ends then
        # A thread that ends now makes room.
        is_admitted = self._connections.acquire(timeout=_ROOM_S if ended else 0.0)
        if not is_admitted:
            self.end_reading(request)
        return is_admitted

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except RuntimeError as error:  # no thread
            logger.warning(
                "the verifier closes a client's connection, because no thread can be started for it: %s; raise the "
                "limit on processes and threads (ulimit -u)",
                error,
            )
            self.end_reading(request)
            self.shutdown_request(request)
            self._connections.release()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.end_reading(request)
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the exception that ended a connection. It must be called while the exception is handled."""
        if isinstance(sys.exception(), OSError):
            logger.debug("a connection ended", exc_info=True)  # peers can cause it at will
        else:
            logger.exception("a request failed by a bug")

    def end_reading(self, request: socket.socket) -> None:
        """Note that the request on the connection ``request`` is complete, or that the connection has ended."""
        with self._reading_lock:
            self._reading.remove(request)

    def judge(self, request: Any) -> dict[str, Any]:
        """Run the program in ``request``, the JSON of one POST. Return the answer's JSON: ``result`` and ``metadata``.

        Raises:
            ValueError: ``request`` is malformed.
            RewardError: the sandbox failed.
        """
        source, tests, code = _parse_request(request, self._code)
        with self._free:
            judgement = LocalJudge(self._sandbox, code).judge(source, tests)
        return _answer(judgement)

    def close(self) -> None:
        self.server_close()
        self._sandbox.close()


def serve(bind: str, overrides: Sequence[str], *, insecure: bool) -> None:
    """Run a verifier at the address ``bind`` until it is interrupted. This is the body of ``async-rl verifier``.

    ``overrides`` are the settings from ``--set``, such as ``reward.code.num_workers=8``.

    Raises:
        AddressError: ``bind`` is malformed or in use, or is not loopback although ``insecure`` is False.
        ConfigError: an override does not set a valid ``reward.code`` key.
        SandboxError: this machine can't isolate programs.
    """
    host, port = check_address(f"tcp://{bind}")
    if not insecure and not is_loopback(host):
        raise AddressError(
            f"--bind {bind}: the verifier does not authenticate clients; bind to 127.0.0.1, or add --insecure on a "
            f"trusted network"
        )
    for override in overrides:
        if not override.strip().startswith("reward.code."):
            raise ConfigError(f"--set {override}: a verifier takes only reward.code.* keys; leave this one out")
    raw: dict[str, Any] = {"run": {"dir": "unused"}, "model": {"path": "unused"}}
    for override in overrides:
        apply_override(raw, override)
    code = parse_config(raw, "--set").reward.code
    try:
        server = VerifierServer((host, port), code)
    except OSError as error:
        raise AddressError(
            f"--bind {bind}: can't bind this address: {error.strerror or error}; choose another port or host"
        ) from None
    logger.info("verifier at http://%s:%d, %d programs at a time", host, server.server_address[1], code.num_workers)
    try:
        server.serve_forever()
    finally:
        server.close()


class _Handler(BaseHTTPRequestHandler):
    timeout = _SOCKET_TIMEOUT_S

    def setup(self) -> None:
        super().setup()
        # A connection ends if its whole request has not arrived in time, however slowly bytes keep coming.
        self._deadline = threading.Timer(_REQUEST_S, shut_down, (self.connection,))
        self._deadline.daemon = True
        self._deadline.start()

    def finish(self) -> None:
        self._deadline.cancel()
        super().finish()

    def do_POST(self) -> None:
        if self.path != PATH:
            return self._reply(404, {"error": f"expected POST {PATH}, got POST {self.path}; correct the path"})
        if "Origin" in self.headers:
            return self._reply(
                403, {"error": "expected no Origin header, because web pages may not use the verifier; remove it"}
            )
        length = self.headers.get("Content-Length", "")
        if not _LENGTH.fullmatch(length) or int(length) > MAX_REQUEST_BYTES:
            return self._reply(
                413,
                {
                    "error": f"expected a request with a Content-Length up to {MAX_REQUEST_BYTES}, got "
                    f"{length[:20]!r}; send less"
                },
            )
        try:
            assert isinstance(self.server, VerifierServer)
            body = self.rfile.read(int(length))
            self._deadline.cancel()
            self.server.end_reading(self.connection)
            return self._reply(200, self.server.judge(json.loads(body)))
        except (ValueError, RecursionError) as error:
            return self._reply(400, {"error": str(error)})
        except RewardError as error:
            logger.exception("can't judge a program, so the client gets HTTP 503: %s", error)
            return self._reply(503, {"error": str(error)})

    def _reply(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


def _parse_request(request: Any, code: CodeRewardConfig) -> tuple[str, CodeTests, CodeRewardConfig]:
    if not isinstance(request, dict) or not isinstance(request.get("generation"), str):
        got = str(request)[:200]
        raise ValueError(
            f'malformed request: expected {{"in_outs": ..., "generation": text, "timeout": seconds}}, got {got}; '
            f"correct the client"
        )
    tests = parse_tests({"test_cases": request.get("in_outs")})
    settings = request.get("settings", {})
    if not isinstance(settings, dict):
        raise ValueError(f"malformed request: settings: expected an object, got {settings!r:.200}; correct the client")
    asked: dict[str, Any] = {
        "time_limit_s": _at_most(request.get("timeout"), code.time_limit_s),
        "total_time_limit_s": _at_most(settings.get("total_timeout"), code.total_time_limit_s),
        "partial_credit": settings.get("all_tests", code.partial_credit),
        "compare": settings.get("compare", code.compare),
        "prelude": settings.get("prelude", code.prelude),
    }
    return request["generation"], tests, CodeRewardConfig.model_validate(code.model_dump() | asked)


def _at_most(asked: Any, own: float) -> Any:
    return min(asked, own) if isinstance(asked, int | float) and not isinstance(asked, bool) else own


def _answer(judgement: Judgement) -> dict[str, Any]:
    ran = [(verdict, note) for verdict, note in zip(judgement.verdicts, judgement.notes) if verdict != "not_run"]
    notes = [{"verdict": verdict, "stderr": note} for verdict, note in ran]
    return {"result": [CODES[verdict] for verdict, _ in ran], "metadata": notes}
