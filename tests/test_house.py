"""The house rules: imports run downward, light modules stay light, the package list is the tree."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

from async_rl.extensions import OFFERS
from async_rl.registry import load, our_offers

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "async_rl"
SHIPPED = tuple(path.parent for path in sorted(ROOT.glob("packages/*/src/*/__init__.py")))
"""The packages of ``packages/``, whose files async-rl's wheel has, too."""

SEPARATE = {("generator", "learner"), ("learner", "generator")}
"""Neither imports the other, although the order would allow one of both."""

HEAVY = ("torch", "transformers")
LIGHT = (
    "registry", "extensions.insight", "extensions.ops.commands", "extensions.ops.slurm",
    "extensions.ops.sinks.check", "extensions.ops.mirror", "errors", "attention_limits", "sampling_mask", "routes",
    "records", "config", "net", "process", "run", "rewards", "environments", "data", "queue",
    "launch", "cli", "api", "launch.checks.doctor", "launch.checks.table", "learner.memory_plan",
    "extensions.quickstart", "extensions.offline.commands", "extensions.code_rewards",
    "generator.start", "generator.backend", "generator.conformance", "generator.parity",
    "generator.fake", "generator.rollouts", "generator.teachers", "generator.environment_rollouts",
    "generator.open_sequence", "extensions.agents",
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


def imported(tree: ast.AST, name: str, *, runs: bool = True) -> Iterator[tuple[str, bool]]:
    """Modules of this package that ``tree`` names, anywhere in it, and whether it imports them when it runs.

    It does not run imports for type checking. Nor does it run those of a text that is a module's name, for a child
    process or ``importlib``. The name of a kind of what is offered, such as ``async_rl.checks``, is none.
    """
    for node in ast.iter_child_nodes(tree):
        is_text = (
            isinstance(node, ast.Constant)
            and node.value not in OFFERS
            and re.fullmatch(r"async_rl(\.\w+)+", str(node.value))
        )
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: expected absolute imports"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and is_text:
            names = [str(node.value)]
        else:
            is_guard = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            yield from imported(node, name, runs=runs and not is_guard)
            continue
        for full in names:
            if full == "async_rl" or full.startswith("async_rl."):
                yield module_of(full.removeprefix("async_rl").removeprefix(".")), runs and not is_text


def module_of(target: str) -> str:
    """The module behind an import: ``rewards.judge.Judge`` is ``rewards.judge``, ``__version__`` the package itself."""
    while target and target not in MODULES:
        target = target.rpartition(".")[0]
    return target or "__init__"


Imports = Mapping[str, Iterable[tuple[str, bool]]]
IMPORTS: Imports = {
    name: sorted(set(imported(ast.parse(path.read_text(encoding="utf-8")), name))) for name, path in MODULES.items()
}


def room(name: str) -> str:
    """The room of a module: its folder, which is ``weights.tcp`` for ``weights.tcp.delta``; at the top, itself."""
    return name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0] or name


def order() -> list[str]:
    """The rooms, lowest first, as CONTRIBUTING.md lists them: highest first, also inside a row."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition("## Source tree")[2].partition("\n## ")[0]
    cells = re.findall(r"^\|([^|]*`[^|]*)\|", section, re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`([\w/]+?)(?:/|\.py)`", cell)]
    return [name.replace("/", ".") for name in reversed(listed)]


ORDER = order()


def upward(imports: Imports) -> list[str]:
    """What ``imports`` breaks of the order. Imports for type checking and modules' names in texts count, too.

    ``async_rl`` itself may name any module: it imports what it offers when that is used.
    """
    wrong: list[str] = []
    for name, targets in imports.items():
        for target, _ in targets if name != "__init__" else ():
            if ORDER.index(room(target)) > ORDER.index(room(name)):
                wrong.append(f"async_rl.{name} imports upward: async_rl.{target}")
            if (name.partition(".")[0], target.partition(".")[0]) in SEPARATE:
                wrong.append(f"async_rl.{name} imports async_rl.{target}, and they are to be separate")
    return wrong


def circle(imports: Imports) -> list[str]:
    """Modules that import each other in a circle, also inside functions, the first one again at the end; [] if none."""
    needs = {name: {target for target, runs in targets if runs and target != name} for name, targets in imports.items()}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_the_table_of_contributing_lists_every_room_once():
    rooms = {room(name) for name in MODULES}
    assert set(ORDER) ^ rooms == set(), "correct the table in CONTRIBUTING.md"
    assert len(ORDER) == len(rooms)


def test_imports_run_downward_only():
    wrong = upward(IMPORTS)
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle():
    found = circle(IMPORTS)
    assert not found, " imports ".join(f"async_rl.{name}" for name in reversed(found))


def printed(program: str) -> list[str]:
    """What a new Python prints that runs this program."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_light_modules_import_no_torch():
    names = [m for m in MODULES if any(m == light or m.startswith(f"{light}.") for light in LIGHT)]
    assert {light for light in LIGHT if light not in MODULES} == set(), "LIGHT names modules that are gone"
    printed(
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(f'async_rl.{name}')\n"
        f"    for heavy in {HEAVY!r}:\n"
        "        assert heavy not in sys.modules, f'async_rl.{name} imports {heavy}'\n"
    )


def test_the_command_line_itself_imports_next_to_nothing():
    heavy = ("torch", "transformers", "zmq", "pydantic", "rich", "numpy", "matplotlib", "wandb", "msgpack", "jinja2")
    assert printed(f"import sys, async_rl.cli.main\nprint([n for n in {heavy!r} if n in sys.modules])") == ["[]"]


def test_the_package_itself_imports_nothing_of_its_own_until_it_is_used():
    program = (
        "import sys, async_rl\n"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] in ('async_rl', 'pydantic', 'torch')))\n"
        "async_rl.train, async_rl.Run, async_rl.load_config\n"
        "print([name for name in ('torch', 'transformers', 'pandas', 'datasets') if name in sys.modules])\n"
    )
    assert printed(program) == ["['async_rl']", "[]"]


def test_every_package_of_the_tree_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["setuptools"]["packages"]["find"] == {
        "where": [".", *(str(path.parent.relative_to(ROOT)) for path in SHIPPED)],
        "include": ["async_rl*", *(f"{path.name}*" for path in SHIPPED)],
    }
    for package in (PACKAGE, *SHIPPED):
        data = project["tool"]["setuptools"]["package-data"][package.name]
        assert "py.typed" in data, "so that pyright reads our types"
        assert {path.parent for path in package.rglob("*.py")} == {path.parent for path in package.rglob("__init__.py")}


def test_packages_import_nothing_of_async_rl_and_say_what_their_wheel_needs():
    assert [path.name for path in SHIPPED] == ["latex_answers"]
    files = [path for path in (ROOT / "packages").rglob("*.py") if "site-packages" not in path.parts]
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert list(imported(tree, str(path))) == [], path
        assert ast.get_docstring(tree), path
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for package in SHIPPED:
        project = tomllib.loads((package.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
        assert set(project["project"]["dependencies"]) <= set(ours["project"]["dependencies"])
        data = project["tool"]["setuptools"]["package-data"][package.name]
        assert data == ours["tool"]["setuptools"]["package-data"][package.name]


ALLOWED = {("quickstart", "insight")}
"""An extension that imports another one."""


def extension(name: str) -> str:
    """The extension that a module belongs to; empty for the core."""
    first, *rest = name.split(".")
    return rest[0] if first == "extensions" and rest else ""


def over_the_line(imports: Imports) -> list[str]:
    """What of ``imports`` leads into an extension from the core or from another extension."""
    return [
        f"async_rl.{name} imports async_rl.{target}"
        for name, targets in imports.items()
        for target, _ in targets
        if extension(target) not in ("", extension(name)) and (extension(name), extension(target)) not in ALLOWED
    ]


def test_the_core_imports_no_extension_nor_they_each_other():
    assert not over_the_line(IMPORTS)


@pytest.mark.parametrize("kind", OFFERS)
def test_what_our_extensions_offer_is_there(kind: str):
    for name, offer in our_offers(kind).items():
        if kind != "async_rl.sinks" or find_spec(name) is not None:  # else its tool is not installed here
            assert load(offer) is not None


def test_contributing_names_files_and_functions_that_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`([\w/]+/\w+\.py)`", page))
    assert len(paths) > 40
    roots = (ROOT, PACKAGE, PACKAGE / "learner")
    missing = {path for path in paths if not any((root / path).exists() for root in roots)}
    assert missing == {"async_rl/weights/collective/rccl.py"}, "only the file that an example adds is missing"
    places = re.findall(r"`(\w+)`(?: and `(\w+)`)? in\s`([\w/]+\.py)`", page)
    assert len(places) > 10
    for *names, path in places:
        source = ((PACKAGE if (PACKAGE / path).exists() else ROOT) / path).read_text(encoding="utf-8")
        for name in filter(None, names):
            assert re.search(rf"(def|class) {name}\b|^{name}\b", source, re.MULTILINE), f"{path} has no {name}"


def test_every_module_says_what_it_is():
    silent = [
        name for name, path in MODULES.items() if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_every_direct_dependency_is_pinned_in_the_constraints():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {_normal(line.partition("==")[0]) for line in lines if "==" in line}
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert {_normal(re.split(r"[<>=~!\[ ;]", item)[0]) for item in wanted} <= pinned


def _normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return name.strip().lower().replace("_", "-").replace(".", "-")
