"""A program for another Python, the one that has ``verifiers``: it plays the rollouts of one generator with a taskset.

It imports only the standard library and ``verifiers``, and runs by its path: ``python -P PATH serve DESCRIPTOR
TASKSET`` plays, and ``python -P PATH rows TASKSET START STOP`` writes the taskset's rows to its standard output.
``verifiers_agent`` starts both. ``environment.extra`` is the config of the environment, what ``vf-eval`` calls
``--env.*``, and in addition ``client``, the config of the client. It comes as a line of JSON: over the socket
DESCRIPTOR, or on the standard input.

The answer to the settings is a line with ``error``; it is empty if all is well. From then on each byte of the socket
brings the descriptor of a connection, which is one rollout. It begins with a line that has ``base_url`` and the row's
fields. The reply is a line with ``reward`` and ``metrics``; or with ``kind``, ``error`` and ``status_code``, if the
rollout failed. A connection that closes earlier stops its rollout.

A row holds a task whole, as it does for verifiers' own environment server, so that the machines of generators load no
data. It has the digest of the taskset's code in addition: another version may read other fields, or score differently.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import itertools
import json
import math
import os
import socket
import sys
from pathlib import Path
from typing import Any

TASK, DIGEST = "verifiers_task", "verifiers_digest"
"""The fields of a row: its task as JSON text, and the digest of the code that wrote it."""
_MAX_BYTES = 64 << 20


def main() -> None:
    sys.path.append(os.getcwd())
    what, *rest = sys.argv[1:]
    if what == "rows":
        taskset, start, stop = rest
        write_rows(taskset, json.loads(sys.stdin.readline()), int(start), int(stop) if stop else None)
    else:
        descriptor, taskset = rest
        asyncio.run(serve(socket.socket(fileno=int(descriptor)), taskset))


def load(taskset: str, extra: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the environment, and the config of the client of its rollouts without their address.

    Programs run as subprocesses, unless the settings of an agent have another runtime.

    Raises:
        ValueError: the settings can't train: several agents call the policy, or a rollout may be tried again.
    """
    from verifiers.v1.configs.agent import AgentConfig, agent_config_fields  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.loaders import (  # pyright: ignore[reportMissingImports]
        env_config_type,
        load_environment,
        resolve_env_config,
    )

    raw = {**extra, "taskset": {**extra.get("taskset", {}), "id": taskset}}
    client = {"type": "eval", **raw.pop("client", {})}
    fields = env_config_type(taskset, raw.get("id", "")).model_fields
    for name in [name for name, field in fields.items() if isinstance(field.default, AgentConfig)]:
        raw[name] = {"runtime": {"type": "subprocess"}, **raw.get(name, {})}
    config = resolve_env_config(raw)
    agents = agent_config_fields(config)
    trained = [name for name, agent in agents.items() if agent.client is None]
    if len(trained) != 1:
        raise ValueError(
            f"expected one agent that asks the policy, got {trained}: set a client and a model for each other agent"
        )
    if any(one.retries.max_retries or one.retries.rules for one in (config, *agents.values())):
        raise ValueError("expected no retries, because the calls of a failed try would be trained on, got some")
    return load_environment(config), client


def digest(taskset: Any) -> str:
    """Return the SHA-256, in hex, of the taskset's code: the Python files of its package, or its only file."""
    from verifiers import __version__  # pyright: ignore[reportMissingImports]

    path = Path(inspect.getfile(type(taskset)))
    files = sorted(path.parent.rglob("*.py")) if (path.parent / "__init__.py").is_file() else [path]
    found = hashlib.sha256(__version__.encode())
    for file in files:
        found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def write_rows(taskset_name: str, extra: dict[str, Any], start: int, stop: int | None) -> None:
    """Write the tasks from ``start`` to ``stop`` (exclusive) as JSON Lines. Exit with a message if they are endless."""
    output, sys.stdout = sys.stdout, sys.stderr  # what a taskset prints is no row
    taskset = load(taskset_name, extra)[0].taskset
    if stop is None and not taskset.bounded:
        sys.exit(
            f"expected a last row for the endless taskset {taskset_name}, got none; write [{start}:{start + 1000}]"
        )
    kind = type(taskset).task_type().data_type()
    if hidden := [name for name, field in kind.model_fields.items() if field.exclude]:
        sys.exit(f"{kind.__name__} leaves {hidden} out of its rows, so its tasks can't be sent; drop exclude=True")
    code = digest(taskset)
    for task in itertools.islice(taskset, start, stop):
        text = task.data.model_dump_json(exclude_defaults=True)
        output.write(json.dumps({TASK: text, DIGEST: code}) + "\n")


async def serve(control: socket.socket, taskset: str) -> None:
    """Play the rollouts whose connections come over ``control``, until it is closed."""
    control.setblocking(False)
    loop = asyncio.get_running_loop()
    settings = bytearray()
    while not settings.endswith(b"\n"):
        settings += await loop.sock_recv(control, 1 << 16)
    async with contextlib.AsyncExitStack() as stack:
        try:
            environment, client = load(taskset, json.loads(settings))
            await stack.enter_async_context(environment.serving())
            code = digest(environment.taskset)
        except Exception as error:  # a mistake in the settings or in the taskset, which the user gets in words
            await loop.sock_sendall(control, _line({"error": f"{type(error).__name__}: {error}"}))
            return
        await loop.sock_sendall(control, _line({"error": ""}))
        rollouts: set[asyncio.Task[None]] = set()
        while (connection := await _connection(control)) is not None:
            rollout = loop.create_task(play(environment, client, code, connection))
            rollouts.add(rollout)
            rollout.add_done_callback(rollouts.discard)


async def _connection(control: socket.socket) -> socket.socket | None:
    """Wait for the next rollout's connection. None if no further one comes."""
    readable = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(control, readable.set)
    await readable.wait()
    loop.remove_reader(control)
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


async def play(environment: Any, client: dict[str, Any], code: str, connection: socket.socket) -> None:
    """Play one rollout. It stops if its connection is closed."""
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=_MAX_BYTES)
    try:
        if not (line := await reader.readline()):
            return
        playing = asyncio.ensure_future(_reply(environment, client, code, json.loads(line)))
        gone = asyncio.ensure_future(reader.read())
        await asyncio.wait([playing, gone], return_when=asyncio.FIRST_COMPLETED)
        if playing.done():
            writer.write(_line(playing.result()))
            await writer.drain()
        else:
            playing.cancel()
            await asyncio.wait([playing])
        gone.cancel()
    except ConnectionError:
        pass  # the rollout was stopped at its end
    finally:
        writer.close()


async def _reply(environment: Any, client: dict[str, Any], code: str, request: dict[str, Any]) -> dict[str, Any]:
    if request.get(DIGEST) != code:
        text = "the row is of another taskset or another version of it; write the rows again, and install one version"
        return {"kind": "row", "error": text}
    try:
        return _result(await _episode(environment, client, request))
    except Exception as error:  # a broken row or environment fails its rollout, not those beside it
        return {"kind": type(error).__name__, "error": f"{type(error).__name__}: {error}"}


async def _episode(environment: Any, client: dict[str, Any], request: dict[str, Any]) -> Any:
    from pydantic import TypeAdapter  # pyright: ignore[reportMissingImports]
    from verifiers.v1.clients import ClientConfig, ModelContext  # pyright: ignore[reportMissingImports]
    from verifiers.v1.types import SamplingConfig  # pyright: ignore[reportMissingImports]

    kind = type(environment.taskset).task_type()
    task = kind(kind.data_type().model_validate_json(request[TASK]), environment.config.taskset.task)
    # The key is in the address, so the harness and what it runs never hold it.
    address = {**client, "base_url": request["base_url"], "api_key_var": "ASYNC_RL_NO_KEY"}
    context = ModelContext(
        client=TypeAdapter(ClientConfig).validate_python(address), model="policy", sampling=SamplingConfig()
    )
    (slot,) = environment.slots(task)
    return await environment.run_slot(slot, context)


def _result(episode: Any) -> dict[str, Any]:
    errors = [error for one in (episode, *episode.traces) if not one.ok for error in one.errors]
    if errors:
        last = errors[-1]
        return {"kind": last.type, "error": f"{last.type}: {last.message}", "status_code": last.status_code}
    traces = [one for one in episode.traces if one.agent.trainable and one.agent.config.model == "policy"]
    if len(traces) != 1:
        text = (
            f"expected one trace of the policy, got {len(traces)}: an environment that plays a task several times does"
        )
        return {"kind": "traces", "error": f"{text} not fit, because a rollout has one reward"}
    trace = traces[0]
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    found = {**scores, **trace.metrics, "turns": trace.num_turns}
    metrics = {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}
    return {"reward": trace.reward, "metrics": metrics}


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


if __name__ == "__main__":
    main()
