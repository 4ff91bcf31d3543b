"""Random damage to a file: a flipped bit, an overwritten block, a cut, a deletion."""

from __future__ import annotations

from pathlib import Path
from random import Random


def damage(path: Path, random: Random) -> str:
    """Damage a file that is not empty; what was done."""
    data = bytearray(path.read_bytes())
    place = random.randrange(len(data))
    what = random.choices(("flip", "block", "cut", "delete"), (6, 2, 2, 1))[0]
    before = f"{what} {path} at {place} of {len(data)}"
    if what == "flip":
        data[place] ^= 1 << random.randrange(8)
    elif what == "block":
        data[place : place + 512] = random.randbytes(min(512, len(data) - place))
    elif what == "cut":
        del data[place:]
    if what == "delete":
        path.unlink()
    else:
        path.write_bytes(data)
    return before
