"""Whether each installation that the pages, the container and SkyPilot's tasks name can be had, and how large it is.

    python -m benchmarks.installations [ROW...]

``uv`` (0.9 or later, on the PATH or named in ``$UV``) chooses the packages for Linux on x86-64 from metadata alone:
nothing is downloaded or installed. Prints a row for each installation, and exits with 1 if one has no solution. GB are
those of the wheels, packed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("torch", "transformers", "vllm", "nccl4py")
TIMEOUT_S = 600.0


class Installation(NamedTuple):
    """What is asked of the resolver. ``constraints`` is a file of the repository; empty: none."""

    place: str
    python: str
    extras: tuple[str, ...] = ()
    constraints: str = ""


ROWS = (
    *(Installation("README, wheel", python) for python in ("3.11.9", "3.12", "3.13")),
    *(Installation("make", python, ("dev", "agents"), "constraints.txt") for python in ("3.11.1", "3.11.9")),
    Installation("deploy/container", "3.11.9", ("agents", "prometheus"), "constraints.txt"),
    Installation("SkyPilot, learner", "3.11.9", ("agents", "prometheus"), "constraints.txt"),
    Installation("SkyPilot, generators", "3.11.9", ("agents", "prometheus", "vllm")),
    *(Installation("engines", python, ("vllm",)) for python in ("3.11.9", "3.12", "3.13")),
    Installation("engines", "3.12", ("vllm", "nccl")),
    *(Installation("one extra", "3.11.9", (name,)) for name in ("nccl", "smollm2", "quantized", "agents", "s3", "gs")),
    *(Installation("one extra", "3.11.9", (name,)) for name in ("tensorboard", "trackio", "mlflow", "gem", "bench")),
    Installation("all of them", "3.12", ("nccl", "quantized", "agents", "s3", "tensorboard", "prometheus", "vllm")),
)


def resolved(row: Installation) -> str:
    """Return a row of the table: how many packages, their size, the versions of ``SHOWN``; or why there are none."""
    with tempfile.TemporaryDirectory() as directory:
        lock = Path(directory) / "pylock.toml"
        extras = [word for name in row.extras for word in ("--extra", name)]
        pins = ["-c", str(ROOT / row.constraints)] if row.constraints else []
        done = subprocess.run(
            [
                os.environ.get("UV", "uv"), "pip", "compile", "--quiet", "--python-version", row.python,
                "--python-platform", "x86_64-manylinux_2_35", str(ROOT / "pyproject.toml"), *extras, *pins,
                "--format", "pylock.toml", "-o", str(lock),
            ],
            capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        what = f"| {row.place} | {row.python} | {', '.join(row.extras)} |"
        if done.returncode:
            return f"{what} REFUSED: {' '.join(done.stderr.split())[:400]} |"
        packages = tomllib.loads(lock.read_text(encoding="utf-8")).get("packages", [])
    size = sum((one.get("wheels") or [one.get("sdist", {})])[0].get("size", 0) for one in packages)
    versions = {one["name"]: one.get("version", "") for one in packages}
    shown = ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)
    return f"{what} {len(packages)} packages, {size / 1e9:.2f} GB: {shown} |"


def main() -> None:
    """Print the table, or those rows whose place contains one of the arguments."""
    chosen = [row for row in ROWS if not sys.argv[1:] or any(word in row.place for word in sys.argv[1:])]
    print("| where | Python | extras | found |\n|---|---|---|---|")
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(resolved, chosen))
    print("\n".join(found))
    raise SystemExit(any("REFUSED" in row for row in found))


if __name__ == "__main__":
    main()
