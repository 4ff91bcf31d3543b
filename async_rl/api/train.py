"""``train``: what ``async-rl launch`` does, called from a script or a notebook."""

from __future__ import annotations

import re
import shlex
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

from async_rl.api.code_name import refuse_while_imported
from async_rl.api.inputs import Base, Inputs, Rows, read_inputs
from async_rl.api.run import Run
from async_rl.config.config import Config
from async_rl.errors import RunError, RunFailedError, StoppedError, UserError
from async_rl.launch.launch import Ended, launch
from async_rl.registry import load, our_offers

Source = str | PathLike[str] | Rows
Reward = str | Callable[..., Any]

_IN_PYTHON = {
    "`async-rl launch --takeover`": "takeover=True", "--takeover": "takeover=True", "--fresh": "fresh=True",
    "--from": "source", "--insecure": "insecure=True", "the same command": "the same call",
    "set it in the file or with --set": "pass it", "set data.train": "pass data",
    "in [data.columns]": 'by data={"train": ROWS, "columns": {"prompt": NAME, "gt_answer": NAME}}',
    'set data.on_bad_row = "skip"': 'pass "on_bad_row": "skip" beside "train"',
}  # fmt: skip
"""What messages of ``launch`` call an option -> what ``train`` does."""


def train(
    model: str | PathLike[str] | Mapping[str, Any] | None = None,
    data: Source | Mapping[str, Any] | None = None,
    reward: Reward | Sequence[Reward] | Mapping[str, Any] | None = None,
    *,
    run: str | PathLike[str] | Mapping[str, Any] | None = None,
    config: Base = None,
    fresh: bool = False,
    source: str | None = None,
    insecure: bool = False,
    takeover: bool = False,
    quiet: bool = False,
    **sections: Mapping[str, Any],
) -> Run:
    """Start a run on this machine, wait until it is finished, and return it. A run that was begun before goes on.

    The run has the checks, processes and files of ``async-rl launch``, and shows its progress in the same way. Ctrl-C
    saves the last step, ends the run and returns it; the same call resumes it. A second Ctrl-C ends it at once.

    Args:
        model: ``model.path``.
        data: ``data.train``: a file, a data set of the hub, or rows: dicts, a DataFrame or a ``datasets.Dataset``.
            Rows are written to the run directory. So are those in a section ``data``, under ``train`` and ``eval``.
        reward: ``reward.type``: a name or a function. Generators import the function, so it must be in a file. Several
            in a list are summed: the first is ``reward.type``, the others are ``reward.extra`` with weight 1. A section
            may have functions, too, such as ``{"type": right, "extra": {brief: 0.1}}``.
        run: ``run.dir``, the run directory.
        config: a base that the other arguments change: a config file, a dict of sections, or a ``Config``. Without it,
            sections that are left out get the sizes and the learning rate that ``async-rl init`` would choose.
        fresh: move an earlier run in the directory aside, and start a new one.
        source: ``RUN`` or ``RUN@STEP``, the run from which to fork.
        insecure: allow network addresses without keys.
        takeover: take the run directory from another process that uses it.
        quiet: show only a summary at the end.
        sections: the other sections of the config as dicts, such as ``sampling={"group_size": 8}``. Each of the four
            arguments above may be such a section, too.

    Raises:
        UserError: the run can't start, for a reason that the user can correct. No process was started. Its traceback
            ends in this call, because the message says what to correct; the cause is kept if it has one.
        RunFailedError: the run failed. The message has the first cause.
        StoppedError: SIGTERM ended the run.
    """
    refuse_while_imported()
    if threading.current_thread() is not threading.main_thread():
        raise RunError(
            f"async_rl.train: expected a call in the main thread, which gets Ctrl-C, got one in "
            f"{threading.current_thread().name}; call it there, or start `async-rl launch` as a process"
        )
    try:
        inputs = _read(config, {"run": run, "model": model, "data": data, "reward": reward, **sections}, quiet=quiet)
        ended = launch(
            inputs.config, fresh=fresh, source=source, insecure=insecure, takeover=takeover, quiet=quiet,
            name_next=False, write_inputs=inputs.write,
        )  # fmt: skip
    except UserError as error:
        error.args = tuple(map(_in_python, map(str, error.args)))
        raise error.with_traceback(None) from error.__cause__
    return _ended_run(ended, Run(inputs.config.run.dir), quiet=quiet)


def _read(config: Base, sections: Mapping[str, Any], *, quiet: bool) -> Inputs:
    """Read the arguments of ``train``. Without ``config``, sections that are left out get the sizes that ``async-rl
    init`` chooses, which are printed unless ``quiet``.
    """
    model: Any = sections["model"]
    path = model.get("path") if isinstance(model, Mapping) else model
    if config is not None or path is None:
        return read_inputs(config, sections)
    given = [name for name, value in sections.items() if value is not None]
    sizes = load(our_offers("async_rl.python")["sizes"])(str(path), given)
    inputs = read_inputs(sizes, sections)
    if sizes and not quiet:
        print(_sizes_line(sizes, inputs.config))  # noqa: T201
    return inputs


def _sizes_line(sizes: Mapping[str, Mapping[str, Any]], config: Config) -> str:
    """Return what was guessed, and how much there is to sample."""
    keys = ", ".join(f"{name}.{key} = {value}" for name, table in sizes.items() for key, value in table.items())
    num_answers = config.learner.groups_per_step * config.sampling.group_size
    return (
        f"sizes that `async-rl init` chooses here (pass a section to choose them): {keys}; {config.learner.steps} "
        f"steps of {num_answers} answers of up to {config.sampling.max_new_tokens} tokens"
    )


def _ended_run(ended: Ended, run: Run, *, quiet: bool) -> Run:
    """Return the run, or raise what a failed or stopped one raises. Print how to go on after Ctrl-C; and unless
    ``quiet``, which call writes a page about a finished run.
    """
    # Indented lines quote logs.
    why = "\n".join(line if line.startswith(" ") else _in_python(line) for line in ended.why)
    if ended.exit_code == 128 + signal.SIGTERM:
        raise StoppedError(why)
    if 0 < ended.exit_code < 128:
        raise RunFailedError(why)
    if why:
        print(why)  # noqa: T201 - Ctrl-C
    if run.is_finished and not quiet:
        print(f"a page about it: run.report(), or `async-rl report {shlex.quote(str(run.path))}`")  # noqa: T201
    return run


def _in_python(text: str) -> str:
    """Return a message of ``launch`` with the arguments of ``train`` for the options of the command line."""
    return re.sub("|".join(map(re.escape, _IN_PYTHON)), lambda found: _IN_PYTHON[found[0]], text)
