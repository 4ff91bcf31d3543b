"""The connection to a judge: a service with OpenAI's chat completions over HTTP. Called by ``judge.py``.

A service that can't be reached, is overloaded (HTTP 429) or broken (5xx), hangs, or sends anything but a completion, is
asked again until it answers, with growing pauses. A service that refuses a request (other codes, such as 401) is not.
The key goes nowhere but into the request's header: no error and no log line has it, and redirections are not followed.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from async_rl.config.judge import JudgeConfig
from async_rl.errors import ConfigError, RewardError

logger = logging.getLogger(__name__)

_PATH = "/chat/completions"
_LARGEST_REPLY_BYTES = 16 << 20
_LARGEST_ERROR_BYTES = 1 << 16
_MOST_TOKENS = 1 << 31
"""Most tokens of a request or a verdict. A service that counts more is broken."""
_COUNTS = ("requests", "failed", "cached", "unreadable", "prompt_tokens", "completion_tokens")
_CLOSED = "the judge gave no verdict before this process ended"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_AGAIN = (408, 409, 425, 429)
"""HTTP codes below 500 after which the same request may succeed."""


class _UnavailableError(Exception):
    """The service gave no completion, but may give one later. ``pause_s`` is the pause that it asks for, if any."""

    def __init__(self, cause: str, pause_s: float = 0.0) -> None:
        super().__init__(cause)
        self.pause_s = pause_s


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion's text. ``is_cut`` says that it ended at its limit of tokens, so a score may lack digits."""

    text: str
    is_cut: bool


class _NoRedirections(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class JudgeClient:
    """Asks the service of ``reward.judge``. Any thread may call it.

    Attributes:
        trouble: why the service gives no completions; empty if nothing is known to be wrong.
        num_waiting: the number of requests that wait for a completion.
    """

    def __init__(self, config: JudgeConfig, *, first_pause_s: float = _FIRST_PAUSE_S) -> None:
        """Read the key from the environment. Nothing is sent yet.

        Raises:
            ConfigError: the variable of ``reward.judge.api_key_env`` is not set.
        """
        assert config.endpoint is not None
        self._url = config.endpoint.rstrip("/").removesuffix(_PATH) + _PATH
        self._timeout_s, self._first_pause_s = config.timeout_s, first_pause_s
        self._headers = {"Content-Type": "application/json"}
        self._key = ""
        if config.api_key_env is not None:
            self._key = os.environ.get(config.api_key_env, "")
            if not self._key:
                raise ConfigError(
                    f"reward.judge.api_key_env: expected the key in the environment variable {config.api_key_env}, "
                    f"got none; set it where the generator starts, or leave the key out"
                )
            if not self._key.isascii() or not self._key.isprintable():
                # http.client would refuse the header, and quote it.
                raise ConfigError(
                    f"reward.judge.api_key_env: expected a key of printable ASCII characters in the environment "
                    f"variable {config.api_key_env}, got others, such as the end of a line; remove them"
                )
            self._headers["Authorization"] = f"Bearer {self._key}"
        self._opener = urllib.request.build_opener(_NoRedirections)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._slots = threading.BoundedSemaphore(config.max_concurrent)
        self._open: set[Future[Any]] = set()
        self._closed = threading.Event()
        self.trouble = ""
        self.num_waiting = 0

    def counters(self) -> dict[str, int]:
        """Return the number of requests, of those without a completion, of verdicts from the cache, of unreadable
        ones, of tokens that the service counted, and their cost in millionths of the currency of the prices.
        """
        with self._lock:
            return {f"judge_{name}": self._counts[name] for name in _COUNTS}

    def close(self) -> None:
        """Let the calls that wait raise RewardError, and later ones too."""
        self._closed.set()
        with self._lock:
            waiting = list(self._open)
        for reply in waiting:
            with suppress(InvalidStateError):
                reply.set_exception(RewardError(_CLOSED))

    def ask(self, request: dict[str, Any]) -> Completion:
        """Send ``request`` until the service answers it. Return the completion.

        Raises:
            RewardError: the service refuses the request, or the client is closed.
        """
        body = json.dumps(request).encode()
        with self._lock:
            self.num_waiting += 1
        pause_s = self._first_pause_s
        try:
            with self._slots:
                while not self._closed.is_set():
                    try:
                        completion = self._completion_of(self._sent(body))
                    except _UnavailableError as error:
                        self._note(str(error))
                        self._closed.wait(min(_LONGEST_PAUSE_S, max(pause_s, error.pause_s)))
                        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
                    else:
                        self._note("")
                        return completion
        finally:
            with self._lock:
                self.num_waiting -= 1
        raise RewardError(_CLOSED)

    def _sent(self, body: bytes) -> Any:
        """Send one request in a thread of its own, which a service that hangs may keep. Return the JSON of the reply.

        Raises:
            RewardError: the service refuses the request, or the client is closed meanwhile.
            _UnavailableError: it does not answer in time.
        """
        reply: Future[Any] = Future()
        with self._lock:
            self._counts["requests"] += 1
            self._open.add(reply)
        threading.Thread(target=self._send, args=(body, reply), name="judge request", daemon=True).start()
        try:
            return reply.result(self._timeout_s)
        except TimeoutError:
            reply.cancel()  # the thread ends at the next bytes
            raise _UnavailableError(f"no reply within reward.judge.timeout_s = {self._timeout_s:g} s") from None
        finally:
            with self._lock:
                self._open.discard(reply)

    def _send(self, body: bytes, reply: Future[Any]) -> None:
        result: Any = None
        try:
            result = self._read(body, reply)
        except BaseException as error:
            with suppress(InvalidStateError):  # the client is closed, or nobody waits any more
                reply.set_exception(error)
            return
        with suppress(InvalidStateError):
            reply.set_result(result)

    def _read(self, body: bytes, awaited: Future[Any]) -> Any:
        """Send a request, and read the reply while it is ``awaited``.

        Raises:
            RewardError: the service refuses the request.
            _UnavailableError: it can't answer now.
        """
        post = urllib.request.Request(self._url, body, self._headers, method="POST")
        try:
            with self._opener.open(post, timeout=self._timeout_s) as reply:
                content = bytearray()
                while len(content) < _LARGEST_REPLY_BYTES and not awaited.done() and (part := reply.read1(1 << 16)):
                    content += part
                return json.loads(content)
        except urllib.error.HTTPError as error:
            with error:
                said = self._without_key(error.read(_LARGEST_ERROR_BYTES).decode(errors="replace"))
            cause = f"HTTP {error.code} {self._without_key(error.reason)}: {said[:500]}"
            if error.code < 500 and error.code not in _AGAIN:
                raise RewardError(
                    f"reward.judge: expected a completion from {self._url}, got {cause}; correct reward.judge.endpoint "
                    f"and reward.judge.model, or the key in the variable that reward.judge.api_key_env names"
                ) from None
            raise _UnavailableError(cause, _seconds(error.headers.get("Retry-After"))) from None
        except (OSError, ValueError, HTTPException, RecursionError) as error:  # the last: nested too deeply
            raise _UnavailableError(self._without_key(f"{type(error).__name__}: {error}")) from None

    def _completion_of(self, reply: Any) -> Completion:
        """Return the completion, and count its tokens.

        Raises:
            _UnavailableError: the reply is no completion.
        """
        try:
            choice = reply["choices"][0]
            text, is_cut = choice["message"]["content"], choice.get("finish_reason") == "length"
            usage = reply.get("usage") or {}
            counts = [int(usage.get(key) or 0) for key in ("prompt_tokens", "completion_tokens")]
            if not 0 <= min(counts) <= max(counts) <= _MOST_TOKENS:
                raise ValueError("not numbers of tokens")
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError):
            raise _UnavailableError(f"no completion, but {self._without_key(json.dumps(reply))[:200]}") from None
        self.count(prompt_tokens=counts[0], completion_tokens=counts[1])
        return Completion(text if isinstance(text, str) else "", is_cut)  # a refusal has null

    def _without_key(self, text: str) -> str:
        """Return ``text`` without the key, which services quote."""
        return text.replace(self._key, "(the key)") if self._key else text

    def count(self, **counts: int) -> None:
        """Add to counters, by name."""
        with self._lock:
            self._counts.update(counts)

    def _note(self, trouble: str) -> None:
        """Remember and log why the service does not answer, and later that it does."""
        if trouble:
            self.count(failed=1)
        with self._lock:
            before, self.trouble = self.trouble, trouble and f"the judge at {self._url} does not answer: {trouble}"
        if self.trouble and not before:
            logger.warning("%s; grading waits until it does", self.trouble)
        elif before and not trouble:
            logger.info("the judge at %s answers again", self._url)


def _seconds(retry_after: str | None) -> float:
    """Return the pause of a header ``Retry-After`` in seconds. 0 if it has none, or a date."""
    try:
        return max(0.0, float(retry_after or 0))
    except ValueError:
        return 0.0
