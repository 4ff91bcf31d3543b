"""The generator: one process that samples rollouts with one inference engine.

Enters: leases (prompts to sample) from the queue, versions of the weights from the learner.
Leaves: scored groups of rollouts, with behavior log-probabilities and a version for each token.
Called by: ``async-rl generator`` and ``launch`` (``worker``); offline evaluation and the doctor use its parts.

``loop`` receives weights, requests leases, steps the backend, has rollouts scored and returns groups. ``parity``
answers the learner's probes. ``rollouts`` turns leases into scored answers, ``environment_rollouts`` plays several
turns, ``offline`` answers leases without a queue. ``backend`` has the protocol and the table of inference engines,
``conformance`` their tests. ``hf`` and ``vllm`` are engines, ``fake`` is one without a model.
"""
