"""What plays sessions on this machine: the user's agent, a command, or a taskset of ``verifiers``, each in a process.

``pool`` starts the processes of an ``EnvironmentPool``, which ``fork_server`` forks. ``command`` and
``verifiers_agent`` are agents themselves, which these processes import. ``isolation`` keeps commands from each other.
``verifiers_program`` runs in another Python, and ``verifiers_rows`` has it write rows.
"""
