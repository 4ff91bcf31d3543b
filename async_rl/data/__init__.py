"""Datasets and tokenizers on disk: files or hub ids enter, checked rows and rendered prompts leave.

The queue server loads rows, backends load tokenizers and render prompts, and preflight checks both before a run starts.
No weights are read here.
"""
