"""The fork server of agents, and the processes that it forks: each plays rollouts with an agent, one at a time.

It is the ``environments.fork_server``, whose processes play agents: an agent makes its calls over HTTP, and its process
only waits for its end. The last message of a rollout also says ``is_alone``: whether all processes that it has started
have ended.
"""

from __future__ import annotations

import inspect
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.environments.child import EnvironmentFault, RemoteRollout, awaited, is_finite, serve
from async_rl.environments.fork_server import main
from async_rl.environments.protocol import Task
from async_rl.process.fault_points import fault_point
from async_rl.process.sandbox import system

MAX_METRICS = 64
"""Maximum number of metrics of an agent's rollout, and of characters of a name."""
_PR_SET_CHILD_SUBREAPER = 36


def serve_agents(sock: socket.socket, code: Any) -> None:
    """Play rollouts with the agent ``code`` until the generator closes the socket."""
    if sys.platform == "linux":  # become the parent of all that descend from this process and lose theirs
        system.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    serve(sock, code, _play, lambda: {"is_alone": is_alone()})


def is_alone() -> bool:
    """Return whether all processes that this one or its children have started have ended; they are reaped.

    False where orphans can't be adopted, because they can't be found there.
    """
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return False
        except ChildProcessError:
            return sys.platform == "linux"


class AgentTask:
    """The ``protocol.Task`` of an agent. The built-in ones also read:

    Attributes:
        command: the program that plays, with its arguments; empty if none does.
        sandbox: ``environment.sandbox``.
        finish_key: the key with which the program may report its rollout's reward.
    """

    def __init__(self, rollout: RemoteRollout) -> None:
        endpoint = rollout.endpoint
        assert endpoint is not None
        self.base_url, self.api_key = str(endpoint["base_url"]), str(endpoint["api_key"])
        self.command: Sequence[str] = endpoint["command"]
        self.sandbox = str(endpoint["sandbox"])
        self.finish_key = str(endpoint["finish_key"])
        self.extra_info, self.prompt = rollout.extra_info, rollout.prompt
        state = rollout.first_state
        self.messages = [] if state is None or isinstance(state, str) else [dict(message) for message in state]


async def _play(code: Any, rollout: RemoteRollout) -> dict[str, Any]:
    return await play_agent(code, AgentTask(rollout))


async def play_agent(code: Any, task: Task) -> dict[str, Any]:
    """Run the agent ``code``, a function or an object with a method ``run``, to its end.

    Return its reward, score and metrics (numbers by name). The first two are None if the agent returned None: the run's
    reward functions judge then.

    Raises:
        EnvironmentFault: it is no agent, or returned something else than a number, a dict or None.
    """
    run = code if inspect.isroutine(code) else getattr(code() if inspect.isclass(code) else code, "run", None)
    if run is None:
        raise EnvironmentFault(
            "environment.name: expected an agent, because generator.serve is true: an async function, or a module or "
            "class with an async function run, got neither; name the function: file.py:name"
        )
    fault_point("agent.begun")  # an agent's process has its rollout, the agent's code is not started
    made = await awaited(run(task))
    fault_point("agent.ended")  # the agent has returned, the generator does not know
    result: dict[str, Any] = dict(made) if isinstance(made, Mapping) else {"reward": made}
    metrics: Any = result.pop("metrics", None) or {}
    if not isinstance(metrics, Mapping):
        raise EnvironmentFault(
            f"the agent's result: metrics: expected a dict of numbers, got {metrics!r:.60}; correct what it returns"
        )
    if len(metrics) > MAX_METRICS or any(len(str(name)) > MAX_METRICS for name in metrics):
        raise EnvironmentFault(
            f"the agent's result: expected at most {MAX_METRICS} metrics, with names of at most {MAX_METRICS} "
            f"characters, got more; leave some out"
        )
    unknown = sorted(map(str, set(result) - {"reward", "score"}))
    result |= {f"metrics.{name}": value for name, value in metrics.items()}
    wrong = [name for name, value in result.items() if value is not None and not is_finite(value)]
    if unknown or wrong:
        name = (unknown or wrong)[0]
        raise EnvironmentFault(
            f"the agent's result: expected a finite number, a dict with reward, score and metrics, or None, got "
            f"{name} = {result[name]!r:.60}; correct what it returns"
        )
    numbers = {name: None if (value := result.get(name)) is None else float(value) for name in ("reward", "score")}
    return {**numbers, "metrics": {str(name): float(value) for name, value in metrics.items() if value is not None}}


def reach_loopback_directly() -> None:
    """Let this process, and those that it starts, ask no proxy of the environment for addresses of this machine."""
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))


if __name__ == "__main__":
    reach_loopback_directly()
    main(serve_agents)
