"""The vLLM backend. The engine runs in processes of its own; see docs/vllm.md.

Enters: leases, and weights by version. Leaves: finished samples. Called by ``generator.backends``.

``backend`` and ``engine`` run in the generator's process, ``core`` in vLLM's engine core, ``weights``, ``prepare`` and
``double_buffer`` in its workers. ``plugin`` is what vLLM loads there, ``shared_staging`` the memory that carries the
weights.
"""
