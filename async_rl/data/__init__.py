"""Reads datasets, tokenizers and the small files of models. Model weights are not read here.

The input is a path or a hub id. The output is the checked rows of a dataset, a tokenizer, or a prompt as token ids.
The queue server loads rows. Generators' backends load tokenizers and turn prompts into token ids. The checks before a
run starts load both.
"""
