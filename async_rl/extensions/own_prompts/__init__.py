"""Training prompts from a source of the user's own (``data.source``), in place of rows of a data set.

The queue server builds the ``stream``. Nothing else knows how its prompts come.
"""
