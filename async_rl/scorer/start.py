"""The body of ``async-rl scorer``: load the model, check that it is the run's, and serve."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch

from async_rl.config.config import Config
from async_rl.config.scorer import ScorerConfig
from async_rl.data.chat import model_directory
from async_rl.errors import AddressError, ConfigError, ModelError, naming
from async_rl.net.address import refuse_open_bind
from async_rl.net.keys import ServerKeys
from async_rl.output import logged
from async_rl.process.stop import noted_signals
from async_rl.run.directory import RunDir, write_atomically
from async_rl.scorer.reward_model import RewardModel
from async_rl.scorer.server import ScorerServer, ScoringModel
from async_rl.scorer.teacher import Teacher
from async_rl.scorer.vllm_engine import prepare_process

logger = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def run_scorer(config: Config, name: str | None, *, insecure: bool) -> None:
    """Serve the scorer ``name`` of ``config`` until SIGTERM or SIGINT. None: the only one.

    Raises:
        ConfigError: there is no such scorer, or its model is not the one with which the run began.
        ModelError: the model can't be used.
        AddressError: the address can't be bound, or is open to a network.
        KeyFileError: the keys of ``queue.keys`` are missing or malformed.
    """
    name = _chosen(config, name)
    scorer = config.scorer[name]
    keys = None if config.queue.keys is None else ServerKeys.load(config.queue.keys)
    with naming(f"scorer.{name}.address", AddressError):
        refuse_open_bind(scorer.address, insecure=insecure, has_keys=keys is not None)
    with logged(logger, f"loading the model {scorer.model}"):
        model = load_scorer(config, name)
    check_digest(RunDir(Path(config.run.dir)), name, model.digest, scorer.digest)
    server = ScorerServer(scorer.address, model, keys)
    logger.info("scorer %s at %s: the model %s has the digest %s", name, scorer.address, scorer.model, model.digest)
    stopped = noted_signals()
    try:
        server.serve(lambda: bool(stopped))
    finally:
        server.close()


def _chosen(config: Config, name: str | None) -> str:
    if name is None and len(config.scorer) == 1:
        return next(iter(config.scorer))
    known = ", ".join(config.scorer)
    if not known:
        raise ConfigError("expected a table [scorer.NAME] in the config, got none; add one")
    if name is None:
        raise ConfigError(f"expected the name of one of the config's scorers ({known}), got none; add it")
    if name not in config.scorer:
        raise ConfigError(f"expected the name of a scorer of the config ({known}), got {name!r}; correct it")
    return name


def load_scorer(config: Config, name: str) -> ScoringModel:
    """Load the model of the scorer ``name`` to this machine's GPU, or to the CPU if there is none.

    Raises:
        ModelError: the model can't be used, or its backend is not installed.
    """
    scorer = config.scorer[name]
    if scorer.backend == "vllm":
        prepare_process(f"scorer.{name}.backend")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with naming(f"scorer.{name}.model", ModelError):
        directory = model_directory(scorer.model, weights=True)
        rewards = partial(RewardModel, arguments=config.data.content_argument)
        kind = rewards if name == config.reward.model else Teacher
        return kind(directory, scorer, device=device, dtype=_dtype(scorer, device))


def _dtype(scorer: ScorerConfig, device: torch.device) -> torch.dtype:
    auto = "bfloat16" if device.type == "cuda" else "float32"
    return _DTYPES[auto if scorer.dtype == "auto" else scorer.dtype]


def check_digest(run_dir: RunDir, name: str, digest: str, expected: str | None) -> None:
    """Check that a scorer's model is the run's: ``expected``, and what its first start noted in the run directory.

    Note it there if this is the first start. Without a run directory on this machine nothing is noted.

    Raises:
        ConfigError: it is another model.
    """
    note = run_dir.scorers / name
    first = note.read_text(encoding="utf-8").strip() if note.is_file() else None
    for known, where in ((expected, f"scorer.{name}.digest"), (first, str(note))):
        if known not in (None, digest):
            raise ConfigError(
                f"scorer.{name}.model: expected the model with the digest {known} ({where}), got one with the digest "
                f"{digest}; a run can't go on with another scorer, so restore the model, or start a new run"
            )
    if first is None and run_dir.path.is_dir():
        run_dir.scorers.mkdir(exist_ok=True)
        write_atomically(note, f"{digest}\n")
