"""From a checkpoint to a Hugging Face directory: ``model.py`` is called by commands and by the learner at its end,
``shards.py`` writes weights piece by piece, so that the whole model is never in memory.
"""
