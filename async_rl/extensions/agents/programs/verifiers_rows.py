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

from async_rl.config.config import Config
from async_rl.errors import DataError
from async_rl.extensions.agents.programs.verifiers_agent import program_command, program_variables

_PART = re.compile(r"(?P<name>.+?)(?:\[(?P<start>\d*):(?P<stop>\d*)\])?")
_SHOWN_CHARACTERS = 2000


@contextmanager
def taskset_rows(run: Config, source: str) -> Iterator[Path]:
    """Write the rows of ``source`` to a file of JSON Lines, which exists inside the ``with`` block.

    Raises:
        DataError: ``source`` is not the taskset of the environment or a part of it; the program can't be run; or
            verifiers can't load the taskset.
    """
    config, found = run.environment, _PART.fullmatch(source)
    if found is None or found["name"] != config.name:
        raise DataError(
            f"{source}: expected the taskset of environment.name = {config.name!r} or a part of it, as in "
            f"verifiers:TASKSET[0:900], got another one; correct the name"
        )
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
