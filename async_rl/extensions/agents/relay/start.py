"""The body of ``async-rl agent``: find the run's relay, and serve until the run is finished."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence
from pathlib import Path

from async_rl.errors import AddressError, ConfigError, QueueError
from async_rl.extensions.agents.relay.loopback import BACKLOG, require_packages, serve_http
from async_rl.net.address import refuse_open_connect
from async_rl.net.keys import ClientKeys
from async_rl.queue.client.clients import LearnerQueue

logger = logging.getLogger(__name__)

KEY_VARIABLE = "ASYNC_RL_AGENT_KEY"
"""Name of the environment variable with the API key that ``POST /sessions`` asks for; any if it is unset."""


def relay_of(address: str, keys: ClientKeys | None, wait_s: float) -> str:
    """Return the address of the relay of the run whose queue server is at ``address``.

    Raises:
        AddressError: no queue server answered within ``wait_s`` seconds.
        ConfigError: the run has no relay.
    """
    queue = LearnerQueue(address, max(wait_s, 1.0), keys)
    try:
        found = queue.status().get("relay")
    except QueueError as error:
        raise AddressError(str(error)) from error
    finally:
        queue.close()
    if not found:
        raise ConfigError(
            f"the run whose queue server is at {address} offers its sessions to no programs on other machines; set "
            f"environment.relay in its config"
        )
    return str(found)


def run_agent(
    address: str, command: Sequence[str], *, keys_file: Path | None, insecure: bool, port: int, num_parallel: int,
    wait_s: float, sessions_key: str,
) -> None:  # fmt: skip
    """Take sessions of the run whose queue server is at ``address`` until the run is finished.

    Args:
        command: runs once for each session; empty if programs take sessions themselves.
        keys_file: a client's key file; None if the queue server has no keys.
        insecure: connect to other machines without keys.
        port: the port on loopback; 0 takes any free one.
        num_parallel: the number of sessions for which the command runs at once.
        wait_s: seconds for which the queue server or the relay may be out of reach.
        sessions_key: as in ``Proxy``.

    Raises:
        AddressError: an address is malformed, is in use, is on another machine without keys, or nobody answers there.
        ConfigError: the run has no relay, or packages are missing.
        KeyFileError: the key file is missing or not a client's.
    """
    require_packages("async-rl agent")
    from async_rl.extensions.agents.relay.proxy import Proxy

    refuse_open_connect(address, insecure=insecure, has_keys=keys_file is not None)
    keys = None if keys_file is None else ClientKeys.load(keys_file)
    relay = relay_of(address, keys, wait_s)
    refuse_open_connect(relay, insecure=insecure, has_keys=keys is not None)
    try:
        listener = socket.create_server(("127.0.0.1", port), backlog=BACKLOG)
    except OSError as error:
        raise AddressError(f"can't bind 127.0.0.1:{port}: {error.strerror}; choose another --port") from None
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def run() -> None:
        proxy = Proxy(
            relay, keys, url, sessions_key=sessions_key, command=command, num_parallel=num_parallel
        )  # fmt: skip
        serving = asyncio.create_task(serve_http(proxy.application(), listener))
        try:
            logger.info("sessions are served at %s", url)
            await proxy.run(wait_s)
        finally:
            proxy.close()
            logging.getLogger("uvicorn.error").disabled = True  # the requests that still wait are cut without a word
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    asyncio.run(run())
    logger.info("the run is finished")
