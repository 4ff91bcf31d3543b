"""Makes a task of the quickstart in the working directory: its config, its rows, its model, and the warm start.

All of it lies in one folder for each seed, and is kept there for the next time.
"""

from __future__ import annotations

import hashlib
import shlex
import shutil
import sys
from pathlib import Path

from async_rl.errors import RunError
from async_rl.extensions.quickstart.tasks import Task
from async_rl.process.child import module_command, run_child
from async_rl.terminal import visible

_MARKER = "recipe"
"""Written when everything else is, with the digest of what it was made by."""


def say(*lines: str) -> None:
    """Print lines before the next child process prints its own."""
    sys.stdout.write("".join(f"{visible(line)}\n" for line in lines))
    sys.stdout.flush()


def run_command(*arguments: str) -> None:
    """Print an async-rl command, and run it in a process of its own, in this working directory.

    Raises:
        SystemExit: it failed. The exit code is that of the command.
    """
    say(f"$ async-rl {shlex.join(arguments)}")
    # -P: a file such as queue.py in the working directory must not hide a module.
    code = run_child(module_command("async_rl", *arguments, flags=("-P",)))
    if code:
        raise SystemExit(code if code > 0 else 1)


def recipe_digest(task: Task, seed: int) -> str:
    """Return what changes when the rows, the model or the config of ``seed`` do, so that no stale ones are used."""
    return hashlib.sha256("\0".join([task.config_text(seed), *task.source_texts()]).encode()).hexdigest()


def write_config(task: Task, seed: int) -> Path:
    """Write the task's config for ``seed`` and return its path. Empty the folder first if another recipe made it.

    Raises:
        RunError: files can't be written in the folder, as in a container whose volume belongs to another user.
    """
    directory = task.directory(seed)
    if not _is_made(task, seed):
        shutil.rmtree(directory, ignore_errors=True)
    path = directory / task.config
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(task.config_text(seed), encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"can't write {path} in {Path.cwd()}: {error.strerror or error}; start the quickstart in a directory in "
            f"which this user can write (in a container: a volume at runs/ that belongs to the container's user)"
        ) from error
    return path


def make_task(task: Task, seed: int) -> Path:
    """Make rows and model, by ``async-rl sft`` too if the task says so, unless that was done. Return the config's path.

    Raises:
        SystemExit: ``async-rl sft`` failed.
    """
    directory, config = task.directory(seed), write_config(task, seed)
    if _is_made(task, seed):
        say(f"task: kept in {directory}")
        return config
    task.write(directory, seed)
    say(f"task: {directory}: {task.description}")
    if task.warm_starts:
        run_command(
            "sft", str(config), "--set", f"run.dir={directory / 'sft_run'}", "--set", f"model.path={directory}/base"
        )
    (directory / _MARKER).write_text(recipe_digest(task, seed), encoding="utf-8")
    return config


def _is_made(task: Task, seed: int) -> bool:
    marker = task.directory(seed) / _MARKER
    return marker.exists() and marker.read_text(encoding="utf-8") == recipe_digest(task, seed)
