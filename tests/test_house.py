"""The house rules: imports run downward, light modules stay light, the package list is the tree."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "async_rl"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "output", "terminal", "__init__"),
    ("attention_limits", "sampling_mask", "routes", "records"),
    ("config", "net", "process", "sandbox"),
    ("run", "rewards", "environments", "data", "scoring"),
    ("queue",),
    ("weights",),
    ("generator", "learner", "scorer"),
    ("colocated",),
    ("comparison", "evaluation", "doctor", "launch"),
    ("cli",),
    ("__main__",),
)
"""Lowest first. A name stands for a module, or for a folder with all in it. A module imports from its own layer or
below; ``generator`` and ``learner`` never import each other."""
SEPARATE = {("generator", "learner"), ("learner", "generator")}

HEAVY = ("torch", "transformers")
LIGHT = (
    "errors", "attention_limits", "sampling_mask", "routes", "records", "config", "net", "process", "sandbox", "run",
    "rewards", "environments", "data", "scoring", "queue", "launch", "cli", "comparison",
    "doctor.check", "doctor.machine", "evaluation.table", "learner.memory_plan",
    "generator.start", "generator.backend", "generator.conformance", "generator.parity",
    "generator.fake", "generator.rollouts", "generator.teachers", "generator.offline", "generator.environment_rollouts",
    "generator.vllm.plugin", "generator.vllm.engine", "generator.vllm.adapter",
    "generator.vllm.shared_staging",
    "weights.channel.receiver", "weights.channel.transports", "weights.channel.engine_ranks", "weights.transport",
    "weights.collective.sender", "weights.collective.libraries", "weights.tcp.server", "weights.tcp.delta",
)  # fmt: skip
"""No ``HEAVY`` module is imported at their top, nor by what they import. Folders: all in it."""


def modules() -> dict[str, Path]:
    """Dotted name inside the package -> file; ``queue/__init__.py`` is ``queue``."""
    found: dict[str, Path] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


MODULES = modules()


def imported(tree: ast.AST, name: str) -> Iterator[str]:
    """Modules of this package that ``tree`` imports, anywhere in it, without the package's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: expected absolute imports"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for full in names:
            if full == "async_rl" or full.startswith("async_rl."):
                yield full.removeprefix("async_rl").removeprefix(".")


def layer(name: str) -> int:
    top = name.partition(".")[0] or "__init__"
    for number, names in enumerate(LAYERS):
        if top in names:
            return number
    raise AssertionError(f"async_rl.{name} has no layer: give it one in LAYERS")


def is_submodule_or_name(target: str) -> str:
    """The module behind an import: ``rewards.code.Judge`` is ``rewards.code``, ``__version__`` the package itself."""
    while target and target not in MODULES:
        target = target.rpartition(".")[0]
    return target


def test_imports_run_downward_only():
    wrong: list[str] = []
    for name in sorted(MODULES):
        tree, top = ast.parse(MODULES[name].read_text(encoding="utf-8")), name.partition(".")[0]
        for target in map(is_submodule_or_name, imported(tree, name)):
            if layer(target) > layer(name):
                wrong.append(f"async_rl.{name} imports upward: async_rl.{target}")
            if (top, target.partition(".")[0]) in SEPARATE:
                wrong.append(f"async_rl.{name} imports async_rl.{target}, and they are to be separate")
    assert not wrong, "\n".join(wrong)


def test_light_modules_import_no_torch():
    names = [m for m in MODULES if any(m == light or m.startswith(f"{light}.") for light in LIGHT)]
    assert {light for light in LIGHT if light not in MODULES} == set(), "LIGHT names modules that are gone"
    check = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(f'async_rl.{name}')\n"
        f"    for heavy in {HEAVY!r}:\n"
        "        assert heavy not in sys.modules, f'async_rl.{name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_command_line_itself_imports_next_to_nothing():
    heavy = ("torch", "transformers", "zmq", "pydantic", "rich", "numpy", "matplotlib", "wandb", "msgpack")
    check = f"import sys, async_rl.cli.main\nprint([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_every_package_of_the_tree_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    assert listed == {".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py")}
    assert {path.parent for path in PACKAGE.rglob("*.py")} == {path.parent for path in PACKAGE.rglob("__init__.py")}


def test_every_module_says_what_it_is():
    silent = [
        name for name, path in MODULES.items() if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_every_direct_dependency_is_pinned_in_the_constraints():
    import re

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {_normal(line.partition("==")[0]) for line in lines if "==" in line}
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert {_normal(re.split(r"[<>=~!\[ ;]", item)[0]) for item in wanted} <= pinned


def _normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return name.strip().lower().replace("_", "-").replace(".", "-")
