"""The vLLM backend. It runs vLLM's engine in separate processes (docs/engines.md).

It gets leases and versions of the weights, and returns finished samples. ``generator.start.backends`` builds it.

``backend``, ``engine`` and ``adapter`` run in the generator's process, ``plugin`` in every process of vLLM, ``weights``
in its workers. ``shared_staging`` has the memory that the generator's process shares with vLLM's workers.
"""
