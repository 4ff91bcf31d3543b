"""The generator: one process that samples rollouts with one inference engine.

It gets leases (permissions to sample one group of rollouts for a prompt) from the queue, and versions of the weights
from the learner. It returns scored groups of rollouts to the queue. Each sampled token has its log-probability and the
version of the weights that sampled it. ``async-rl generator`` and ``launch`` run a generator by ``start.worker``.
Offline evaluation and the doctor use parts of this folder.

``loop`` receives weights, requests leases, steps the inference engine, has rollouts scored and returns groups.
``parity`` compares the engine's log-probabilities with the learner's. ``rollouts`` turns leases into scored answers,
``environment_rollouts`` plays rollouts of several turns, and ``offline`` answers leases without a queue. ``backend``
has the protocol of inference engines, and ``conformance`` tests engines. ``hf`` and ``vllm`` are engines. ``fake`` is
an engine without a model. ``start`` has the table of engines, and starts the process.
"""
