"""The transformers backend: continuous batching over a Hugging Face causal LM, on the CPU or one GPU.

Enters: leases, and weights by version. Leaves: finished samples. Called by ``generator.backend``.

``backend`` is the engine; ``slots`` its batch of running sequences and their keys and values, ``sampler`` the choice of
tokens and the log-probabilities of tokens that the learner sends, ``forward`` the passes through the model,
``causal_model`` the model itself and its weights.
"""
