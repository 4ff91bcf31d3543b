"""Chromium without a window, driven over a pipe (the DevTools protocol): open a page, run JavaScript.

It needs no package, only the program.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """Return the path of the browser's program. None if there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Chromium:
    """One page in a browser of its own. Use it as a context manager."""

    def __init__(self, program: str, *, width: int) -> None:
        self._program, self._width = program, width
        self._profile = tempfile.mkdtemp(prefix="async-rl-chromium-")
        self._next_id, self._session, self._buffer = 0, "", b""
        self.errors: list[str] = []
        """Exceptions and errors that the page's scripts reported, and what its policy refused."""

    def __enter__(self) -> Self:
        their_input, our_output = os.pipe()
        our_input, their_output = os.pipe()
        # The browser reads from descriptor 3 and writes to descriptor 4.
        command = f'exec "$0" "$@" 3<&{their_input} 4>&{their_output}'
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
                   f"--user-data-dir={self._profile}", "about:blank"]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", command, self._program, *options],
            pass_fds=(their_input, their_output), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(their_input)
        os.close(their_output)
        self._input, self._output = our_input, our_output
        targets = self._call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        size = {"width": self._width, "height": 900, "deviceScaleFactor": 1, "mobile": self._width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # It ends its other processes itself, which would write to the profile for a while if it was only killed.
        self._session = ""
        with suppress(RuntimeError, OSError):
            self._call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._input)
        os.close(self._output)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, address: str) -> None:
        """Open a page, and wait until its script says that it is ready (``data-ready``).

        What it draws by the width of its boxes is there, too: a browser measures them once before each frame.
        """
        self._call("Page.navigate", url=address)
        self.run(
            "new Promise((done) => { const look = () => document.documentElement?.dataset.ready || "
            "document.documentElement?.dataset.failed ? done() : setTimeout(look, 5); look(); })"
        )
        self.run("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(() => go())))")

    def run(self, expression: str) -> Any:
        """Evaluate JavaScript, wait for its promise if it is one, and return the value as plain data.

        Raises:
            RuntimeError: it raised an exception.
        """
        answer = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression[:80]}: {json.dumps(answer['exceptionDetails'])[:600]}")
        return answer["result"].get("value")

    def _call(self, method: str, **parameters: Any) -> Any:
        self._next_id += 1
        message = {"id": self._next_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._output, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(answer["params"]["exceptionDetails"])[:1000])
            elif answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.errors.append(answer["params"]["entry"]["text"])
            elif answer.get("id") == self._next_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._input, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser has ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)
