"""``async-rl sweep``: launch a config once for each value of one key and each seed, one run after the other.

Each run has a directory of its own below ``<run.dir>-sweep``. Finished runs are not repeated, and an interrupted one
resumes, so the same command goes on where it was stopped. All configs are checked before the first run starts.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.config.loading import load_config
from async_rl.errors import ConfigError
from async_rl.process.child import module_command, run_child
from async_rl.run.reuse import check_run_dir, has_ended

_STDERR = 2


@dataclass(frozen=True, slots=True)
class Variant:
    """One run of a sweep.

    Attributes:
        run_dir: its directory.
        overrides: the ``--set`` options with which it is launched.
        label: the key that differs and its value, and the seed if there are several.
        is_done: whether the run has ended, and needs no launch.
    """

    run_dir: Path
    overrides: tuple[str, ...]
    label: str
    is_done: bool


def plan_sweep(config: Path, overrides: Sequence[str], over: str, num_seeds: int) -> list[Variant]:
    """Return the runs of a sweep, seed after seed, in the order of the values.

    Args:
        config: the config file.
        overrides: ``--set`` options for all runs.
        over: ``KEY=VALUE,VALUE,...``, the key that differs and its values.
        num_seeds: runs of each value. Their seeds are ``run.seed``, ``run.seed`` + 1, ...

    Raises:
        ConfigError: ``over`` is malformed, or the config is wrong with one of the values.
        RunError: a directory of the sweep has a run with another config.
    """
    key, separator, listed = (part.strip() for part in over.partition("="))
    values = [value.strip() for value in listed.split(",")]
    if not separator or not all(values) or len(set(values)) < len(values):
        raise ConfigError(
            f"--over: expected KEY=VALUE,VALUE,... in which no value occurs twice, got {over!r}; write it as in "
            f"--over queue.max_staleness=0,1,4"
        )
    if key in ("run.dir", "run.seed", "run.name"):
        raise ConfigError(f"--over: expected a key other than {key}, which the sweep sets; use --seeds for seeds")
    base = load_config(config, overrides)
    folder = Path(f"{base.run.dir.rstrip('/')}-sweep")
    variants: list[Variant] = []
    for seed in range(base.run.seed, base.run.seed + num_seeds):
        for value in values:
            name = f"{key.rpartition('.')[2]}={value.replace('/', '_')}" + (f"-seed={seed}" if num_seeds > 1 else "")
            own = (f"{key}={value}", f"run.seed={seed}", f"run.dir={json.dumps(str(folder / name))}")
            # Other keys would make a run that is a mixture, so that the sweep compares nothing.
            resolved = load_config(config, [*overrides, *own])
            is_done = has_ended(check_run_dir(resolved, fresh=False, tunable=("learner.steps",)), resolved)
            label = f"{key}={value}" + (f", run.seed={seed}" if num_seeds > 1 else "")
            variants.append(Variant(folder / name, (*overrides, *own), label, is_done))
    return variants


def launch_variant(config: Path, variant: Variant, *, quiet: bool = False) -> int:
    """Run ``async-rl launch`` for one run of a sweep. Return its exit code.

    What ``launch`` prints goes to standard error; with ``quiet``, only its errors do.

    If this process gets SIGINT or SIGTERM, ``launch`` saves its last step first.
    """
    options = [part for override in variant.overrides for part in ("--set", override)]
    options += ["--quiet"] if quiet else []
    command = module_command("async_rl", "launch", str(config), "--no-next", *options)
    return run_child(command, stdout=subprocess.DEVNULL if quiet else _STDERR)
