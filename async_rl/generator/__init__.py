"""The generator: one process that samples rollouts with one inference engine.

Enters: leases (prompts to sample) from the queue, versions of the weights from the learner.
Leaves: scored groups of rollouts, with behavior log-probabilities and a version for each token.
Called by: ``async-rl generator`` and ``launch`` (``worker``); offline evaluation and the doctor use its parts.

``loop`` receives weights, requests leases, steps the backend, has rollouts scored and returns groups; ``loop_state`` is
what it keeps account of. ``rollouts`` turns leases into scored answers, ``environment_rollouts`` plays several turns,
``offline`` answers leases without a queue. ``backend`` is what the loop asks of an engine, ``backends`` the table of
engines, ``conformance`` their tests. ``hf`` and ``vllm`` are engines, ``fake`` one without a model.
"""
