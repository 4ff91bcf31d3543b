"""async-rl: asynchronous off-policy reinforcement learning for language models.

From Python: ``train`` runs a config and waits for its end, ``Run`` reads a run's directory, ``compare`` several,
``load_config`` reads a config file. They are imported when they are used, because every process of a run imports this
module.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_rl.api.run import Run, compare
    from async_rl.api.train import train
    from async_rl.config.loading import load_config

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "compare", "load_config", "train"]

_PLACES = {
    "Run": "async_rl.api.run", "train": "async_rl.api.train", "compare": "async_rl.api.run",
    "load_config": "async_rl.config.loading",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
