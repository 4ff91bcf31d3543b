"""Write the batch scripts of a run, and submit them.

A config and ``JobOptions`` enter. Two scripts leave, in the directory ``RUN_DIR-slurm``, which also gets the jobs' logs
and the keys. It lies next to the run directory, so ``--fresh`` does not move it.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from async_rl.config.config import Config
from async_rl.config.generator import has_model
from async_rl.config.loading import machine_overrides
from async_rl.errors import ConfigError, RunError
from async_rl.launch.checks.settings import check_ranks

LEARNER, GENERATORS = "learner.sbatch", "generators.sbatch"
SIGNAL_MARGIN_S = 30
"""Seconds between the end of ``checkpoint.grace_s`` and the time limit, in which the queue server ends."""

_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9-]*(=[^\n]+)?")


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What a run asks of Slurm.

    Attributes:
        nodes: nodes of the learner's job.
        ranks_per_node: learner ranks on each of them.
        num_generators: jobs of the generators' array. 0: there is no such array.
        sbatch: options of ``sbatch`` for both jobs, without the dashes, such as ``time=04:00:00``.
        setup: lines of shell that both scripts run first. Empty: they use the ``async-rl`` that wrote them.
        has_gpus: whether each rank gets a GPU, and each generator ``generator.tensor_parallel_size`` of them.
    """

    nodes: int
    ranks_per_node: int
    num_generators: int
    sbatch: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    has_gpus: bool = True


@dataclass(frozen=True, slots=True)
class Scripts:
    """The paths of the written scripts. ``generators`` is None if the run has no generators of its own."""

    learner: Path
    generators: Path | None

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.learner, self.generators) if path is not None]

    @property
    def commands(self) -> str:
        """The lines of shell that submit the scripts."""
        first = f"sbatch --parsable {shlex.quote(str(self.learner))}"
        if self.generators is None:
            return first
        return f"JOB=$({first})\nsbatch --dependency=after:$JOB {shlex.quote(str(self.generators))} $JOB"

    def submit(self) -> list[str]:
        """Submit the scripts. Return the ids of the learner's job and, if there are generators, of their array.

        The array starts when the learner's job has started.

        Raises:
            RunError: there is no ``sbatch``, or it refused a script. The message has its own.
        """
        learner = _sbatch(str(self.learner))
        if self.generators is None:
            return [learner]
        try:
            return [learner, _sbatch(f"--dependency=after:{learner}", str(self.generators), learner)]
        except RunError as error:
            raise RunError(f"{error}; the learner's job {learner} is submitted, scancel {learner} ends it") from None


def write_scripts(config: Config, config_words: Sequence[str], options: JobOptions) -> Scripts:
    """Write the scripts of ``config`` to ``RUN_DIR-slurm``.

    Args:
        config_words: the config's path and ``--set`` options, as arguments of queue server and learner.

    Raises:
        ConfigError: the ranks can't be divided as ``[parallel]`` says, an option is malformed, or the config has
            scorers, which these jobs don't start.
        RunError: a script is there already and has other text, or can't be written.
    """
    check_ranks(config, options.nodes * options.ranks_per_node)
    for option in options.sbatch:
        if not _OPTION.fullmatch(option):
            raise ConfigError(
                f"--sbatch: expected an option of sbatch without dashes, such as mem=64G or exclusive, got {option!r}; "
                f"correct it"
            )
    if scorers := [name for name, scorer in config.scorer.items() if scorer.launch]:
        raise ConfigError(
            f"scorer.{scorers[0]}: these jobs start no scorers; start `async-rl scorer` in a job of its own, and set "
            f"scorer.{scorers[0]}.launch = false and its address"
        )
    place = script_directory(config)
    found = Scripts(place / LEARNER, place / GENERATORS if options.num_generators else None)
    texts = {path: render(path.name, config, config_words, options) for path in found.paths}
    for path, text in texts.items():
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise RunError(
                f"{path} was edited, or written for other options, and is not replaced; delete it, or submit it as it "
                f"is:\n{found.commands}"
            )
    try:
        place.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"can't write scripts to {place}: {error.strerror or error}; choose another run.dir") from error
    return found


def render(script: str, config: Config, config_words: Sequence[str], options: JobOptions) -> str:
    """Return the text of ``script``, which is ``LEARNER`` or ``GENERATORS``."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True)
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    template = (files("async_rl.extensions.ops.slurm") / "templates" / script).read_text(encoding="utf-8")
    run_dir, place, keys = Path(config.run.dir).absolute(), script_directory(config), config.queue.keys
    gpus = options.ranks_per_node
    if script == GENERATORS:
        gpus = config.generator.tensor_parallel_size if has_model(config.generator.backend) else 0
    own = [word for override in machine_overrides(config) for word in ("--set", override)]
    return environment.from_string(template).render(
        name=f"{run_dir.name}-{Path(script).stem}", options=options, gpus=gpus if options.has_gpus else 0,
        directory=Path.cwd(), logs=place, signal_s=round(config.checkpoint.grace_s) + SIGNAL_MARGIN_S,
        sbatch=["=".join(map(shlex.quote, option.split("=", 1))) for option in options.sbatch],
        setup=options.setup or (f'export PATH={shlex.quote(sysconfig.get_path("scripts"))}:"$PATH"',),
        run_dir=run_dir, keys=place / "keys" if keys is None else Path(keys).absolute(),
        has_journal=config.queue.journal_dir is None,
        config_words=shlex.join(config_words), generator_words=shlex.join(own),
    )  # fmt: skip


def script_directory(config: Config) -> Path:
    """Return the directory of the scripts, the jobs' logs and the keys."""
    run_dir = Path(config.run.dir).absolute()
    return run_dir.with_name(f"{run_dir.name}-slurm")


def _sbatch(*words: str) -> str:
    """Submit a job and return its id."""
    command = ["sbatch", "--parsable", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RunError(
            "expected sbatch on this machine, found none; leave --submit out, and submit elsewhere"
        ) from None
    if done.returncode:
        raise RunError(f"{shlex.join(command)}: {done.stderr.strip()}; correct the options or the script")
    return done.stdout.strip().partition(";")[0]  # JOB;CLUSTER
