"""The transformers backend: continuous batching over a Hugging Face causal LM, on the CPU or one GPU.

Enters: leases, and weights by version. Leaves: finished samples. Called by ``generator.backends``.

``backend`` is the engine; ``running_sequences`` its batch, ``slot_cache`` their keys and values, ``sampler`` the choice
of tokens and the log-probabilities of tokens that the learner sends, ``forward`` and ``llama_forward`` the passes
through the model, ``causal_model`` the model itself and its weights.
"""
