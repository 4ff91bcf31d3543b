"""Rows of a taskset of ``verifiers``, for ``data.train`` and ``data.eval``: ``verifiers:TASKSET``, or a part of it as
``verifiers:TASKSET[START:STOP]``. The Python of ``environment.python`` writes them (``verifiers_program``).
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from async_rl.config.generator import EnvironmentConfig
from async_rl.environments.verifiers_agent import program_command, program_variables
from async_rl.errors import DataError

_PART = re.compile(r"(?P<name>.+?)(?:\[(?P<start>\d*):(?P<stop>\d*)\])?")
_SHOWN_CHARACTERS = 2000


def is_of_taskset(config: EnvironmentConfig, source: str) -> bool:
    """Return whether ``source``, a data set's name, is the taskset of the environment, or a part of it."""
    found = _PART.fullmatch(source)
    return bool(config.taskset) and found is not None and found["name"] == config.name


@contextmanager
def taskset_rows(config: EnvironmentConfig, source: str) -> Iterator[Path]:
    """Write the rows of ``source`` to a file of JSON Lines, which exists inside the ``with`` block.

    Raises:
        DataError: the program can't be run, or verifiers can't load the taskset.
    """
    found = _PART.fullmatch(source)
    assert found is not None
    start, stop = found["start"] or "0", found["stop"] or ""
    with tempfile.TemporaryDirectory(prefix="async-rl-rows-") as folder:
        path, log = Path(folder) / "rows.jsonl", Path(folder) / "log"
        try:
            with path.open("wb") as file, log.open("wb") as errors:
                done = subprocess.run(
                    program_command(config.python, "rows", config.taskset, start, stop),
                    input=json.dumps(config.extra).encode() + b"\n", stdout=file, stderr=errors,
                    env=program_variables(config.python), check=False,
                )  # fmt: skip
        except OSError as error:
            raise DataError(f"{source}: can't run environment.python = {config.python!r}: {error}") from error
        if done.returncode:
            said = log.read_text(encoding="utf-8", errors="replace").strip()[-_SHOWN_CHARACTERS:]
            raise DataError(
                f"{source}: {config.python} could not write the rows of the taskset; its output ends with: {said}"
            )
        yield path
