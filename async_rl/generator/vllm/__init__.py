"""The vLLM backend. The engine runs in processes of its own; see docs/vllm.md.

Enters: leases, and weights by version. Leaves: finished samples. Called by ``generator.backends``.

``backend``, ``engine``, ``start`` and ``sampling`` run in the generator's process, ``plugin`` in every process of vLLM,
``weights`` and ``prepare`` in its workers. ``worker_link`` is what both sides share: the memory that carries the
weights, and the pipes of commands.
"""
