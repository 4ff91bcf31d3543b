"""The fork server of an environment: imports its code once, lets it prepare, then forks a process for each rollout.

``pool`` starts it with ``python -m async_rl.environments.fork_server DESCRIPTOR NAME``, or another module that calls
``main``, and sends it the message ``prepare`` of ``child``. All else is ``process.fork_server``.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from typing import Any

from async_rl.environments.child import MAX_BYTES, prepare, serve
from async_rl.errors import ConfigError
from async_rl.net.streams import read_frame
from async_rl.process.fork_server import Forker
from async_rl.process.user_code import load_code


def main(play: Callable[[socket.socket, Any], None] = serve) -> None:
    """Fork processes that call ``play`` with a socket and the code that ``sys.argv`` names."""
    forker, name = Forker(sys.argv[1], is_user_code=True), sys.argv[2]
    if (body := read_frame(forker.control.recv, max_bytes=MAX_BYTES)) is None:
        return  # the pool has ended
    settings = json.loads(body)
    try:
        code = load_code(name, allowed=settings["allowed"], digest=settings["digest"])
    except ConfigError as error:
        forker.refuse(str(error))
        return
    if not callable(code) and not any(hasattr(code, function) for function in ("step", "generate", "run")):
        forker.refuse(
            f"expected {name} to have a function step or generate, or to be an agent (run), got neither; see "
            f"docs/environments.md"
        )
    elif error := prepare(code, settings["extra"]):
        forker.refuse(error)
    else:
        forker.serve(lambda connection: play(connection, code))


if __name__ == "__main__":
    main()
