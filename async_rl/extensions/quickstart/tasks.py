"""What the quickstart can train on: each task is a folder of rows with a model, and a config for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from async_rl.extensions.quickstart import instructions, sums
from async_rl.extensions.quickstart.smollm2 import write_smollm2

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Task:
    """A task of the quickstart.

    Attributes:
        folder: where all seeds of the task lie, relative to the working directory. The one of seed 3 is ``seed-3``.
        config: the file in this folder with the config of seed 0: ``run.seed`` and every path name the seed.
        warm_starts: whether ``async-rl sft`` with this config first trains the model ``base`` and writes
            ``model.path``.
        sources: the files of this folder on which the rows and the model depend. If one of them or the config changes,
            they are made again.
        write: write the rows that the config names, and its model or ``base``, into a directory, for a seed.
        description: what it has written, for the user.
    """

    folder: str
    config: str
    sources: tuple[str, ...]
    write: Callable[[Path, int], None]
    description: str
    warm_starts: bool

    def directory(self, seed: int) -> Path:
        """Return where the task of ``seed`` lies."""
        return Path(self.folder) / f"seed-{seed}"

    def config_text(self, seed: int) -> str:
        """Return the config for ``seed``."""
        text = (HERE / self.config).read_text(encoding="utf-8")
        return text.replace(f"{self.folder}/seed-0/", f"{self.directory(seed)}/").replace(
            "\nseed = 0\n", f"\nseed = {seed}\n"
        )

    def source_texts(self) -> list[str]:
        """Return the text of each of ``sources``."""
        return [(HERE / name).read_text(encoding="utf-8") for name in self.sources]


def _write_sums(directory: Path, seed: int) -> None:
    sums.write_task(directory, seed=seed)
    sums.write_model(directory / "base", seed=seed)


SUMS = Task(
    folder="runs/quickstart-task",
    config="quickstart.toml",
    sources=("sums.py",),
    write=_write_sums,
    description="sft.jsonl, train.jsonl, held_out.jsonl; a random model in base/",
    warm_starts=True,
)


def _write_instructions(directory: Path, seed: int) -> None:
    instructions.write_rows(directory, seed=seed)
    model = directory.parent / "model"  # all seeds have the same
    if not model.exists():
        write_smollm2(model)


SMOLLM2 = Task(
    folder="runs/smollm2-task",
    config="smollm2.toml",
    sources=("instructions.py",),
    write=_write_instructions,
    description="train.jsonl, held_out.jsonl; SmolLM2-135M-Instruct in ../model/",
    warm_starts=False,
)
TASKS = {"sums": SUMS, "smollm2": SMOLLM2}
"""The tasks by the names that ``async-rl quickstart --model`` takes."""
