"""The server of ``async-rl verifier``: judges programs for generators whose machines can't isolate them.

``code_remote`` is the other end and describes the protocol. It is plain HTTP without authentication, for loopback or a
trusted network: anybody who reaches it can run programs in the sandbox.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from async_rl.config.loading import apply_override, parse_config
from async_rl.config.reward import CodeRewardConfig
from async_rl.errors import AddressError, ConfigError, RewardError
from async_rl.net.address import check_address, is_loopback
from async_rl.rewards.code import local_judge
from async_rl.rewards.code_judge import Judgement
from async_rl.rewards.code_remote import CODES, PATH
from async_rl.rewards.code_tests import CodeTests, parse_tests

MAX_REQUEST_BYTES = 64 << 20
_SOCKET_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


class VerifierServer(ThreadingHTTPServer):
    """A thread a request, ``code.num_workers`` of them judging at a time. ``close`` it once.

    Args:
        address: host and port to bind; port 0 takes any that is free, see ``server_address``.
        code: limits and packages are this machine's; a request may ask for less time and sets how to judge.

    Raises:
        SandboxError: this machine can't isolate programs.
        OSError: the address can't be bound.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], code: CodeRewardConfig) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self._code = code
        self._judge = local_judge(code)
        self._free = threading.BoundedSemaphore(code.num_workers)

    def judge(self, request: Any) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            ValueError: it is malformed.
            RewardError: the sandbox failed.
        """
        source, tests, code = _parse_request(request, self._code)
        with self._free:
            judgement = self._judge.with_settings(code).judge(source, tests)
        return _answer(judgement)

    def close(self) -> None:
        self.server_close()
        self._judge.close()


def serve(bind: str, overrides: Sequence[str], *, insecure: bool) -> None:
    """Judge until interrupted. The body of ``async-rl verifier``.

    Raises:
        AddressError: ``bind`` is malformed, busy, or open to the network without ``insecure``.
        ConfigError: an override is not a good ``reward.code`` key.
        SandboxError: this machine can't isolate programs.
    """
    host, port = check_address(f"tcp://{bind}")
    if not insecure and not is_loopback(host):
        raise AddressError(
            f"--bind {bind}: nothing authenticates who asks; bind to 127.0.0.1, or add --insecure on a trusted network"
        )
    for override in overrides:
        if not override.strip().startswith("reward.code."):
            raise ConfigError(f"--set {override}: a verifier takes only reward.code.* keys")
    raw: dict[str, Any] = {"run": {"dir": "unused"}, "model": {"path": "unused"}}
    for override in overrides:
        apply_override(raw, override)
    code = parse_config(raw, "--set").reward.code
    try:
        server = VerifierServer((host, port), code)
    except OSError as error:
        raise AddressError(f"--bind {bind}: can't bind: {error.strerror or error}") from None
    logger.info("verifier at http://%s:%d, %d programs at a time", host, server.server_address[1], code.num_workers)
    try:
        server.serve_forever()
    finally:
        server.close()


class _Handler(BaseHTTPRequestHandler):
    timeout = _SOCKET_TIMEOUT_S

    def do_POST(self) -> None:
        if self.path != PATH:
            return self._reply(404, {"error": f"expected POST {PATH}, got POST {self.path}"})
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_REQUEST_BYTES:
            return self._reply(413, {"error": f"expected a Content-Length up to {MAX_REQUEST_BYTES}, got {length!r}"})
        try:
            assert isinstance(self.server, VerifierServer)
            return self._reply(200, self.server.judge(json.loads(self.rfile.read(int(length)))))
        except (ValueError, RecursionError) as error:
            return self._reply(400, {"error": str(error)})
        except RewardError as error:
            logger.exception("a program could not be judged")
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
        raise ValueError('expected {"in_outs": ..., "generation": text, "timeout": seconds}')
    tests = parse_tests({"test_cases": request.get("in_outs")})
    settings = request.get("settings", {})
    if not isinstance(settings, dict):
        raise ValueError(f"settings: expected an object, got {settings!r}")
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
