"""The Dockerfile: its sources exist and reach the build, versions are the project's, no image runs as root."""

import fnmatch
import re
import runpy
import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.generator import BACKENDS

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "deploy/container"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
IMAGES = ("cpu", "cuda")


@dataclass
class Stage:
    """One ``FROM`` of the Dockerfile: its base, and its instructions in order, as (name, arguments)."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        return [arguments for found, arguments in self.instructions if found == name]


def read(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """Return the build arguments with their defaults, and the stages by name."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, rest = line.partition(" ")
        if name == "ARG":
            key, _, default = rest.partition("=")
            arguments[key] = default
        elif name == "FROM":
            base, word, stage = rest.split()
            assert word == "AS"
            stages[stage] = current = Stage(base)
        elif name:
            assert current is not None
            current.instructions.append((name, rest.strip()))
    return arguments, stages


ARGUMENTS, STAGES = read((PLACE / "Dockerfile").read_text(encoding="utf-8"))


def copied() -> list[str]:
    """The paths of the checkout that the Dockerfile copies."""
    found = [shlex.split(copy) for stage in STAGES.values() for copy in stage.all("COPY")]
    return [source for words in found if not words[0].startswith("--from=") for source in words[:-1]]


def reaches_the_build(path: str, rules: list[str]) -> bool:
    """Return whether ``.dockerignore`` lets ``path`` through. The last rule that matches it, or a parent, decides."""
    parents = [path, *map(str, Path(path).parents)]
    is_let = True
    for rule in rules:
        if any(fnmatch.fnmatch(parent, rule.removeprefix("!")) for parent in parents):
            is_let = rule.startswith("!")
    return is_let


def test_what_is_copied_exists_and_is_not_ignored():
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    rules = [rule for rule in rules if rule and not rule.startswith("#")]
    assert {"constraints.txt", "constraints-vllm.txt", "async_rl"} <= set(copied())
    for path in copied():
        assert (ROOT / path).exists(), path
        assert reaches_the_build(path, rules), path
    # Keys, runs and environments never do.
    assert not any(reaches_the_build(path, rules) for path in ("keys/queue.key", "runs/quickstart", ".venv", ".git"))


def test_stages_are_copied_from_and_not_mounted():
    # buildah 1.28 takes a RUN from its cache although a stage that it mounts has changed: the image had an old project.
    text = (PLACE / "Dockerfile").read_text(encoding="utf-8")
    sources = re.findall(r"\bfrom=([\w-]+)", text)
    assert sources
    assert set(sources) <= set(STAGES)
    assert not [run for stage in STAGES.values() for run in stage.all("RUN") if "from=" in run]


def test_versions_are_those_of_the_project():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"\nTORCH := {ARGUMENTS['TORCH']}\n" in makefile
    assert f"\nCPU_INDEX := {ARGUMENTS['CPU_INDEX']}\n" in makefile
    assert f"\ntorch=={ARGUMENTS['TORCH']}\n" in constraints
    vllm = f"vllm=={ARGUMENTS['VLLM_IMAGE'].partition(':v')[2]}"
    assert [vllm] == PROJECT["optional-dependencies"]["vllm"]
    assert vllm in BACKENDS["vllm"].install
    assert f"torch{next(one for one in PROJECT['dependencies'] if one.startswith('torch')).partition(',')[2]}" in README


@pytest.mark.parametrize("image", IMAGES)
def test_no_image_runs_as_root(image: str):
    stage = STAGES[image]
    user = stage.all("USER")[-1]
    # Kubernetes' runAsNonRoot wants a number, because a name may be that of user 0.
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    names = [name for name, _ in stage.instructions]
    assert "RUN" not in names[len(names) - names[::-1].index("USER") :]
    assert any(f"useradd --uid {user.partition(':')[0]} " in run for run in stage.all("RUN"))


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(PLACE / "requirements.py"))


def test_the_requirements_are_the_projects_and_its_extras(script: dict[str, Any]):
    extras = PROJECT["optional-dependencies"]
    used = re.findall(r'wanted \S+ "([^"]*)"', " ".join(STAGES["requirements"].all("RUN")))
    assert len(used) == len(IMAGES)
    for names in used:
        script["wanted"](ROOT / "pyproject.toml", names.replace("${EXTRAS}", ARGUMENTS["EXTRAS"]))
    found = script["wanted"](ROOT / "pyproject.toml", "agents,vllm")
    assert found == [*PROJECT["dependencies"], *extras["agents"], *extras["vllm"]]
    with pytest.raises(SystemExit, match=r"expected some of vllm, .*, got vlm; correct --build-arg"):
        script["wanted"](ROOT / "pyproject.toml", "agents,vlm")


def test_pins_leave_alone_what_an_image_has_and_the_project_does_not_name(tmp_path: Path, script: dict[str, Any]):
    constraints, requirements = tmp_path / "constraints.txt", tmp_path / "requirements.txt"
    constraints.write_text("# made by hand\ntriton==3.9.0\nNumpy==2.3.5\nscikit_learn==1.0\nrich==15.0\n")
    requirements.write_text("numpy>=2.0\nbitsandbytes>=0.49; sys_platform == 'linux'\n")
    found = script["pins"](constraints, requirements, {"triton", "numpy", "scikit-learn"})
    assert found == ["Numpy==2.3.5", "rich==15.0"]
