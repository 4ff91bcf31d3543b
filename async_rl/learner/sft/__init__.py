"""Supervised warm start, the command ``async-rl sft``.

In: rows of prompts and responses. Out: a Hugging Face model directory. It uses the engine and the checkpoints of
reinforcement learning with another objective; there is no queue and no generator. Called by the command line.
"""
