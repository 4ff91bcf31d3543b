"""Run the ``async-rl`` command as ``python -m async_rl``.

``check_installation`` also serves ``cli.py``. It needs only the standard library, and a Python older than we support.
"""

import importlib.util
import sys
from pathlib import Path

_OLDEST = (3, 11)
_NEEDED = ("typer", "pydantic", "torch")  # the first package that a command imports, and two of those that follow


def check_installation() -> None:
    """Exit with code 2 and a message that names the command to run, if async-rl's dependencies are not installed."""
    root = Path(__file__).resolve().parents[1]
    if sys.version_info[:2] < _OLDEST:
        problem = f"expected Python {'.'.join(map(str, _OLDEST))} or newer, got {sys.version.split()[0]}"
    else:
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if not missing:
            return
        problem = f"expected its dependencies, got no {', '.join(missing)}"
    sys.stderr.write(
        f"async-rl: {problem} in {sys.executable}; run `make install` in {root}, then use {root}/.venv/bin/async-rl\n"
    )
    raise SystemExit(2)


if __name__ == "__main__":
    check_installation()
    from async_rl.process.child import PACKAGE_SOURCES

    sys.path[1:1] = PACKAGE_SOURCES
    from async_rl.cli.main import main

    main()
