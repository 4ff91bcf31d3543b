"""The vLLM backend. It runs vLLM's engine in separate processes (docs/vllm.md).

It gets leases and versions of the weights, and returns finished samples. ``generator.backend`` builds it.

``backend``, ``engine`` and ``adapter`` run in the generator's process, ``plugin`` in every process of vLLM, ``weights``
in its workers. ``worker_link`` has the shared memory and the pipes that connect the generator's process with
vLLM's workers.
"""
