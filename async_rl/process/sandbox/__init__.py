"""Runs untrusted programs and commands, each isolated from the machine and from the others. It works only on Linux.

``client.Launcher`` starts a ``launcher`` process, whose own module runs what it is asked to run: it forks a process for
every request, which ``limits.confine`` isolates. The code reward uses it (``extensions/code_rewards/sandbox.py``).
``system`` also serves the programs of agents (``extensions/agents/programs/isolation.py``).
"""
