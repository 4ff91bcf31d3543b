"""A package from outside of the tree that extends async-rl by entry points, without a fork."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, Field

app = typer.Typer(rich_markup_mode=None)


class Settings(BaseModel, extra="forbid"):
    """The table ``[extension.brevity]``."""

    limit: int = Field(default=20, ge=1)


@app.command(short_help="Say how long answers may be.")
def brevity(config: Annotated[Path, typer.Argument(metavar="CONFIG")]) -> None:
    from async_rl import load_config
    from async_rl.config.extension import extension_settings

    settings = extension_settings(load_config(config), "brevity")
    assert isinstance(settings, Settings)
    typer.echo(f"at most {settings.limit} tokens")


def brief(item: Any) -> float:
    """A reward, which is 1 for an answer of at most 20 tokens."""
    return float(item.num_tokens <= 20)


class Lengths:
    """A sink, which writes the mean length of each step to a file in the run directory."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._path = Path(settings["directory"]) / "lengths.txt"

    def write(self, row: Mapping[str, Any]) -> None:
        if "length/mean" in row:
            with self._path.open("a") as file:
                file.write(f"{row['step']} {row['length/mean']:.1f}\n")
