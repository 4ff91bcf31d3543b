"""The run directory: the paths of its files, and the helpers with which they are written.

``launch`` or ``learner`` creates the directory, whichever starts first. Other modules get the paths from ``RunDir``.
``reuse.py`` says which config may use a directory that has a run.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.errors import RunError

_ACCOUNTS: Mapping[str, frozenset[str]] = {
    "groups": frozenset({"trained", "filtered", "dropped"}),
    "rollouts": frozenset(),
    "tokens": frozenset({"trained", "masked"}),
}
"""Accounts of ``ledger.json``, each with the counts that its readers need."""


class _Place:
    """The path of a file or folder, by its name in the run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run_dir: RunDir, owner: object = None) -> Path:
        return run_dir.path / self._name


@dataclass(frozen=True, slots=True)
class RunDir:
    """The paths of a run's files. The constructor does not access the disk."""

    path: Path

    config = _Place("config.toml")
    """A copy of the run's config with all defaults and ``--set`` options filled in."""
    queue = _Place("queue.json")
    """The queue server's run id, process id and address."""
    metrics = _Place("metrics.jsonl")
    notes = _Place("notes.log")
    """Lines for the user of ``launch``."""
    trained = _Place("trained.jsonl")
    config_changes = _Place("config_changes.jsonl")
    """Which keys changed at a restart, and after which step."""
    origin = _Place("origin.json")
    """From which checkpoint of another run this run was forked."""
    data = _Place("data")
    """The folder with the rows that ``async_rl.train`` got from its caller."""
    ledger = _Place("ledger.json")
    rollouts = _Place("rollouts")
    rollout_summaries = _Place("rollouts/summaries.jsonl")
    """Figures of every rollout, a line for each step."""
    report = _Place("report.html")
    """The page that ``async-rl report`` writes."""
    eval = _Place("eval")
    checkpoints = _Place("checkpoints")
    export = _Place("export")
    logs = _Place("logs")
    scorers = _Place("scorers")
    """The folder with a file for each scorer, NAME, that has the digest of its model."""
    curve = _Place("curve.png")
    follow = _Place("follow")
    """The folder of ``async-rl follow``: what each sink of ``log.to`` has, and how the run ended."""
    finished_marker = _Place("finished.json")
    lock = _Place("run.lock")
    """The ``launch`` or ``learner`` that uses the run directory has locked this file."""

    @property
    def run_id(self) -> str:
        """The run's id, read from the file ``run_id``. No other run has the same id.

        The id is generated when the directory is created, and stays the same when the run is resumed.

        Raises:
            RunError: the file is damaged.
            OSError: there is no such file.
        """
        path = self.path / "run_id"
        try:
            run_id = path.read_text(encoding="utf-8").strip()
        except ValueError:
            run_id = ""
        if not run_id or not run_id.isprintable():
            raise RunError(
                f"expected the id of a run in {path}, got other text; the file is damaged: put it back, or start over "
                f"with --fresh (the old directory is moved aside)"
            )
        return run_id

    @property
    def latest_checkpoint(self) -> str | None:
        """The name of the newest checkpoint, as ``checkpoints/latest`` gives it; None if that file does not exist."""
        try:
            return (self.checkpoints / "latest").read_text(encoding="utf-8", errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None

    @property
    def is_finished(self) -> bool:
        """Whether the run has trained its last step and written all its files."""
        return self.finished_marker.exists()

    def read_ledger(self) -> dict[str, Any]:
        """Return the content of ``ledger.json``. It is empty if there is no such file.

        Raises:
            RunError: the file is damaged.
        """
        if not self.ledger.is_file():
            return {}
        try:
            found = read_json(self.ledger)
        except (OSError, ValueError) as error:
            found = error
        wrong = _wrong_in_ledger(found) if isinstance(found, dict) else ""
        if isinstance(found, dict) and not wrong:
            return found
        got = f"something else in {wrong!r}" if wrong else repr(found)[:80]
        raise RunError(
            f"expected a JSON object in {self.ledger}, got {got}; the file is damaged, delete it: async-rl "
            f"only shows it"
        )

    def mark_finished(self, facts: Mapping[str, Any]) -> None:
        """Write ``finished.json``, which marks the run as finished.

        ``facts`` is its content, such as steps and seconds.
        """
        write_atomically(self.finished_marker, json.dumps(dict(facts), indent=2) + "\n")


def _wrong_in_ledger(ledger: Mapping[str, Any]) -> str:
    """Return the key of ``ledger`` whose value is not as the queue server writes it. Empty if there is none."""
    for of in (ledger, ledger.get("eval", {})):
        if not isinstance(of, dict):
            return "eval"
        for key, always in _ACCOUNTS.items():
            account = of.get(key, {})
            if not isinstance(account, dict):
                return key
            needed = always if account and of is ledger else frozenset[str]()
            by_cause = {name for name, count in account.items() if _are_counts(count)}
            counts = {name for name, count in account.items() if is_figure(count)}
            if not needed <= account.keys() or by_cause | counts != account.keys():
                return key
            if by_cause & {"trained", "filtered"} or counts & {"dropped", "masked"}:
                return key
    outcomes = ledger.get("outcomes", {})
    keys = {"groups", "rollouts", "tokens", "reward", "accuracy"}
    if not isinstance(outcomes, dict) or not all(_are_counts(o) and keys <= o.keys() for o in outcomes.values()):
        return "outcomes"
    return ""


def _are_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_figure, value.values()))


def is_figure(value: Any) -> bool:
    """Return whether ``value`` is a number with which can be computed: not NaN, and nowhere near the largest float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e100 < value < 1e100


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: the file can't be read.
        ValueError: it is not JSON.
    """
    content = path.read_bytes()
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("lists or objects in one another, too many levels of them") from None


STEP = re.compile(r"step-(\d{6,})")
"""The name of a checkpoint."""


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint after ``step`` steps."""
    return f"step-{step:06d}"


def step_of(name: object) -> int:
    """Return the step in the name of a checkpoint, or of its folder in a mirror; -1 for other names."""
    match = STEP.match(str(name))
    return -1 if match is None else int(match[1])


def step_files(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Yield the set (of rollouts: ""), the step and the path of each file of records in ``folder``, in their order."""
    for path in sorted(folder.glob("*step-*.jsonl")):
        name, _, step = path.stem.rpartition("step-")
        if step.isdecimal():
            yield name.removesuffix("-"), int(step), path


def appended_lines(path: Path, offset: int) -> tuple[list[str], int]:
    """Return the lines of a growing file after ``offset``, in bytes, without an incomplete last one, and their end."""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    return whole.decode(errors="replace").split("\n")[:-1], offset + len(whole)


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to the file ``path``. Readers see the whole old file or the whole new one."""
    with replaced(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def replaced(path: Path, confirm: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Yield a new path beside ``path``. The ``with`` block writes the file there, which then takes the place of
    ``path``.

    ``confirm`` is called right before that. If it or the block raises, ``path`` stays as it was. A learner that was
    replaced while it wrote must find that out as late as possible.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        confirm()
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):  # the first error is the cause; a part left behind harms nothing
            partial.unlink(missing_ok=True)
        raise


def check_writable(path: Path, key: str) -> None:
    """Check that files can be written in the directory ``path``. If it does not exist, check its nearest parent.

    The check creates a temporary directory and removes it.

    Raises:
        RunError: files can't be written there. The message names ``key``, the config key whose value is ``path``.
    """
    place = path.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise RunError(f"{key}: expected a directory at {path}, but {place} is a file; choose another {key}")
    try:
        with tempfile.TemporaryDirectory(prefix=".async-rl-probe-", dir=place):
            pass
    except OSError as error:
        raise RunError(
            f"{key}: can't write to {path}: {error.strerror or error} in {place}; choose another {key}"
        ) from None


def move_aside(path: Path) -> Path:
    """Rename the directory ``path`` to ``NAME.old-N``, and return the new path.

    N is the lowest number for which no such file exists.
    """
    path = path.resolve()
    return path.rename(unused(path.with_name(f"{path.name}.old")))


def unused(path: Path, suffix: str = "") -> Path:
    """Return ``path``, a hyphen, the first number from 1 on for which there is no such file, and ``suffix``."""
    numbered = (path.with_name(f"{path.name}-{number}{suffix}") for number in itertools.count(1))
    return next(free for free in numbered if not free.exists())
