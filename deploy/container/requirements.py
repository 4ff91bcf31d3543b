"""Say what pip is to install into an image before the project itself. Dockerfile runs this, on plain Python.

python3 requirements.py wanted pyproject.toml agents,prometheus      # the project's requirements and its extras'
python3 requirements.py pins constraints-vllm.txt requirements.txt   # constraints for an image that has packages
"""

import re
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path


def wanted(pyproject: Path, extras: str) -> list[str]:
    """Return the requirements of ``pyproject``, then those of the ``extras``, names with commas between them.

    Raises:
        SystemExit: the project has no extra of such a name.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    known = project["optional-dependencies"]
    names = [name for name in extras.split(",") if name]
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"EXTRAS: expected some of {', '.join(known)}, got {', '.join(unknown)}; correct --build-arg")
    return [*project["dependencies"], *(requirement for name in names for requirement in known[name])]


def pins(constraints: Path, requirements: Path, present: set[str]) -> list[str]:
    """Return the lines of ``constraints`` that hold in an image with the packages ``present``.

    What the image has, and we don't require ourselves, stays as its authors built it: vLLM's CUDA build needs other
    versions of some packages than its CPU build, with which the constraints were made.
    """
    named = {_name(line) for line in requirements.read_text(encoding="utf-8").splitlines()}
    lines = [line for line in constraints.read_text(encoding="utf-8").splitlines() if re.match(r"\w", line)]
    return [line for line in lines if _name(line) in named or _name(line) not in present]


def _name(requirement: str) -> str:
    """Return the package that a requirement names, in the form in which names are compared."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()


if __name__ == "__main__":
    command, first, second = sys.argv[1:]
    here = {_name(found.metadata["Name"]) for found in distributions()}
    lines = wanted(Path(first), second) if command == "wanted" else pins(Path(first), Path(second), here)
    sys.stdout.writelines(f"{line}\n" for line in lines)
