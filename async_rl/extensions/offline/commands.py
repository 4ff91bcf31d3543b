"""The subcommands ``sft``, ``dpo`` and ``rm``. They import large modules only when they run."""

from __future__ import annotations

import logging
from pathlib import Path

import typer

from async_rl.cli.options import ConfigPath, Overrides
from async_rl.cli.role import PLAIN, role

sft_command = typer.Typer(rich_markup_mode=None)
dpo_command = typer.Typer(rich_markup_mode=None)
rm_command = typer.Typer(rich_markup_mode=None)


@sft_command.command("sft", short_help="Supervised warm start on prompts with answers.")
def sft(config: ConfigPath, overrides: Overrides = None) -> None:
    """Supervised warm start: train the model of CONFIG on sft.data and write a Hugging Face directory to sft.out.

    \b
    Example:
      async-rl sft sft.toml --set sft.steps=200
    """
    _train("sft", config, overrides or [])


@dpo_command.command("dpo", short_help="Train on pairs of a chosen and a rejected answer.")
def dpo(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train the model of CONFIG on the preferences in dpo.data and write a Hugging Face directory to dpo.out.

    dpo.loss chooses between DPO (sigmoid), IPO, KTO, SimPO and ORPO.

    \b
    Example:
      async-rl dpo dpo.toml --set dpo.beta=0.05
    """
    _train("dpo", config, overrides or [])


@rm_command.command("rm", short_help="Train a reward model on pairs of answers.")
def rm(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train a reward model: the model of CONFIG on the pairs of rm.data, and write a Hugging Face directory to rm.out.

    \b
    Example:
      async-rl rm rm.toml --set rm.eval.held_out=held_out.jsonl
    """
    _train("rm", config, overrides or [])


def _train(command: str, config: Path, overrides: list[str]) -> None:
    """Prepare this process, and train by ``command``, the name of a task."""
    with role(PLAIN):  # a person waits for it, as for export
        from async_rl.config.loading import load_config
        from async_rl.process.child import set_torch_defaults

        set_torch_defaults(is_learner=True)
        resolved = load_config(config, overrides)
        from async_rl.data.chat import quiet_progress_bars
        from async_rl.run.reuse import check_place

        check_place(resolved, config, overrides)
        logging.getLogger(__name__).info("loading PyTorch")
        quiet_progress_bars()
        from async_rl.extensions.offline.tasks import train

        train(command, resolved)
