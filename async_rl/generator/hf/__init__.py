"""The transformers backend: continuous batching over a Hugging Face causal LM, on the CPU or one GPU.

It gets leases and versions of the weights, and returns finished samples. ``generator.start.backends`` builds it.

``backend`` has the engine. ``slots`` has the batch of running sequences, with their keys and values; ``rows`` decodes
it. ``lockstep`` decodes the batches of models with windows or state, and ``self_test`` chooses one of both.
``sampler`` chooses tokens, and computes the log-probabilities of tokens that the learner sends. ``forward`` runs the
model's forward pass. ``routing`` records which experts it chose. ``causal_model`` builds the model and replaces its
weights.
"""
