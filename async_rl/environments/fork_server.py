"""The fork server of an environment: imports its code once, lets it prepare, then forks a process for each rollout.

``pool`` starts it, and sends it ``environment.extra`` as a message of ``child``, which the environment's function
``prepare`` gets, if it has one. All else is ``process.fork_server``.

The command is ``python -m async_rl.environments.fork_server DESCRIPTOR NAME DIGEST ALLOWED...``. ``DIGEST`` is a
result of ``digest_word``, and ``ALLOWED`` is the list ``generator.allow_code``.
"""

from __future__ import annotations

import sys
from functools import partial

from async_rl.process.fork_server import Forker

_ANY, _SHA256 = "any", "sha256:"


def digest_word(digest: str | None) -> str:
    """Return the argument that tells the fork server which digest the environment's code must have.

    If ``digest`` is None, any code is accepted. If it is empty, no code is accepted.
    """
    return _ANY if digest is None else _SHA256 + digest


def main() -> None:
    descriptor, name, word, *allowed = sys.argv[1:]
    forker = Forker(descriptor, is_user_code=True)
    from async_rl.errors import ConfigError
    from async_rl.process.user_code import load_code

    try:
        code = load_code(name, allowed=allowed, digest=None if word == _ANY else word.removeprefix(_SHA256))
    except ConfigError as error:
        forker.refuse(str(error))
        return
    if not callable(code) and not any(hasattr(code, name) for name in ("step", "generate", "run")):
        forker.refuse(
            f"expected {name} to have a function step or generate, or to be an agent (run), got neither; see "
            f"docs/environments.md"
        )
        return
    from async_rl.environments.child import prepare, serve  # with all that it imports, so no forked process has to

    if error := prepare(forker.control, code):
        forker.refuse(error)
    else:
        forker.serve(partial(serve, code=code))


if __name__ == "__main__":
    main()
