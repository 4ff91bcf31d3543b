"""The vLLM backend. The engine runs in separate processes; see docs/vllm.md.

Enters: leases, and weights by version. Leaves: finished samples. Called by ``generator.backend``.

``backend``, ``engine`` and ``adapter`` run in the generator's process, ``plugin`` in every process of vLLM, ``weights``
in its workers. ``worker_link`` connects both sides: the memory that carries the weights, and the pipes of
commands.
"""
