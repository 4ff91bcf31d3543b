"""What the doctor runs in processes of its own, in its tests."""

import os
import threading

from async_rl.doctor.rows import Row
from async_rl.errors import ModelError


def fine(number: int) -> list[Row]:
    print("libraries print where they like")
    return [Row("fine", "OK", f"{number}")]


def hangs() -> list[Row]:
    threading.Event().wait()
    return []


def dies() -> list[Row]:
    os.write(2, b"the last words\n")
    os._exit(7)


def refuses(check: str) -> list[Row]:
    raise ModelError(f"no such model, {check}")
