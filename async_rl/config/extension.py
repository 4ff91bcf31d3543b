"""``[extension.NAME]``: settings of an installed package, checked by the pydantic model that it offers for them.

A package offers the model as an entry point of the group ``async_rl.config`` under NAME. The model is imported where a
run is checked and where the package's own code asks for its settings, so a generator imports none.
"""

from __future__ import annotations

from pydantic import BaseModel, ValidationError

from async_rl.config.config import Config
from async_rl.config.loading import explain_error
from async_rl.errors import ConfigError
from async_rl.registry import find_offer, load, offers

KIND = "async_rl.config"


def extension_settings(config: Config, name: str) -> BaseModel:
    """Return the table ``[extension.name]`` of ``config``, empty if there is none, as the model that is offered for it.

    Raises:
        ConfigError: no installed package offers a model of that name, or the table does not fit it.
        ExtensionError: the model can't be imported.
    """
    offer = find_offer(KIND, name)
    if offer is None:
        offered = ", ".join(offers(KIND)) or "none"
        raise ConfigError(
            f"extension.{name}: expected a name for which an installed package offers a model ({KIND}), which are: "
            f"{offered}; install the package, or remove the table"
        )
    try:
        return load(offer).model_validate(config.extension.get(name, {}))
    except ValidationError as error:
        details = error.errors(include_url=False)
        lines = [explain_error({**detail, "loc": ("extension", name, *detail["loc"])}) for detail in details]
        raise ConfigError("\n".join(lines)) from None


def check_extension_settings(config: Config) -> None:
    """Check each table ``[extension.NAME]``. Raises ConfigError or ExtensionError for the first that is wrong."""
    for name in config.extension:
        extension_settings(config, name)
