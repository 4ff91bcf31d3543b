"""What the doctor runs in processes of its own, in its tests."""

import os
import threading

from async_rl.errors import ModelError
from async_rl.launch.checks.finding import Finding


def fine(number: int) -> list[Finding]:
    print("libraries print where they like")
    return [Finding("fine", "OK", f"{number}")]


def hangs() -> list[Finding]:
    threading.Event().wait()
    return []


def dies() -> list[Finding]:
    os.write(2, b"the last words\n")
    os._exit(7)


def refuses(check: str) -> list[Finding]:
    raise ModelError(f"no such model, {check}")
