"""How a model is divided over ranks: FSDP, tensor, expert, sequence and pipeline parallelism.

A ``learner.model`` and the sizes of ``[parallel]`` enter; the part of a rank and its communication leave. The caller is
``learner.engine``.
"""
