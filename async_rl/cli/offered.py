"""The group of all subcommands: those of the core, and those that extensions offer, imported when they are named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from async_rl.errors import ExtensionError
from async_rl.registry import find_offer, load, offers

KIND = "async_rl.commands"
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "A run": ("quickstart", "init", "config", "doctor", "launch", "keys", "slurm", "export"),
    "Looking at runs": ("status", "report", "compare", "sweep", "plan", "eval", "follow", "bundle"),
    "Roles by hand, on other machines": ("queue", "learner", "generator", "scorer", "verifier", "relay", "agent"),
    "Other trainings": ("sft", "rm", "dpo", "replay"),
}
"""Headings of the help, and the commands below each, in this order. Those that are not here come after them."""


class OfferedCommands(TyperGroup):
    """Commands in the groups of ``_GROUPS``. The help shows why an offered one can't be loaded, and nothing ends."""

    def list_commands(self, ctx: Any) -> list[str]:
        self._load_all()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, None if there is none. Raises ExtensionError: it is offered, and can't be loaded."""
        if cmd_name not in self.commands:
            if offer := find_offer(KIND, cmd_name):
                self.commands[cmd_name] = _command(load(offer))
            else:
                self._load_all()  # the message names the nearest
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        width = max(map(len, commands))
        for title, names in {**_GROUPS, "Of installed packages": tuple(commands)}.items():
            found = [(name.ljust(width), commands.pop(name)) for name in names if name in commands]
            if found:
                with formatter.section(title):
                    formatter.write_dl([(name, command.get_short_help_str(limit=120)) for name, command in found])

    def _load_all(self) -> None:
        for name, offer in offers(KIND).items():
            if name not in self.commands:
                try:
                    self.commands[name] = _command(load(offer))
                except ExtensionError as error:
                    self.commands[name] = _command(_broken(str(error)))


def _command(app: typer.Typer) -> Any:
    """Return the command of ``app`` without options that would install a shell's completion of it."""
    command = get_command(app)
    command.params = [each for each in command.params if each.name not in ("install_completion", "show_completion")]
    return command


def _broken(why: str) -> typer.Typer:
    """Return a command for the list of commands alone."""
    app = typer.Typer(rich_markup_mode=None)
    app.command(short_help=f"Can't be loaded: {why}")(lambda: None)
    return app
