"""Runs the reader of ``latex_answers`` in processes of its own, because no answer may hang or crash a generator.

``verifier`` is the entry: ``answers`` gives it what ``latex_answers.compare_by`` can't decide without the reader. It
starts ``child``, which alone imports sympy, and kills and replaces a process that exceeds its time limit.
"""
