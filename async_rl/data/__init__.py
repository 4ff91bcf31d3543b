"""Reads datasets, tokenizers and model files. Files or hub ids come in, checked rows and prompts as token ids come out.

The queue server loads rows. Backends load tokenizers and turn prompts into token ids. Preflight checks both before a
run starts. Model weights are not read here.
"""
