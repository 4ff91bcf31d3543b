"""Every file of configs/ loads, and its header says the command, what it needs, and what came out."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from async_rl.cli.main import app
from async_rl.config.loading import load_config
from async_rl.registry import our_offers

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {*typer.main.get_group(app).commands, *our_offers("async_rl.commands")}
RECIPES = sorted((ROOT / "configs").rglob("*.toml"))


def header(recipe: Path) -> list[str]:
    """The comment lines at the top, without their marks."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    count = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    return [line.removeprefix("#").removeprefix(" ") for line in lines[:count]]


def commands(recipe: Path) -> list[list[str]]:
    """The indented lines of the header, as words, without their comments."""
    return [shlex.split(line, comments=True) for line in header(recipe) if line.startswith("    ")]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_loads_and_its_commands_exist(recipe: Path):
    load_config(recipe)
    words = " ".join(header(recipe))
    own = recipe.relative_to(ROOT).as_posix()
    scripts = [ROOT / path for path in re.findall(r"examples/\w+\.py", words)]
    assert own in words or any(own in script.read_text(encoding="utf-8") for script in scripts), words
    for command in commands(recipe):
        assert command[0] in ("async-rl", "python", "make", "torchrun"), command
        if command[0] == "async-rl":
            assert command[1] in COMMANDS
        assert all((ROOT / word).exists() for word in command if word.endswith((".py", ".toml"))), command


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_says_what_it_needs_and_what_came_out(recipe: Path):
    text = "\n".join(header(recipe))
    assert re.search(r"^Needs: \S", text, re.MULTILINE)
    assert re.search(r"^Result: \S", text, re.MULTILINE)
    assert ("Result: not run" in text) == (recipe.parent.name == "not_run_yet")
    # What it names in the repository is there.
    named = re.findall(r"\b(?:configs|docs|examples|tests)/[\w./-]+\.\w+", text)
    assert [path for path in named if not (ROOT / path).exists()] == []
