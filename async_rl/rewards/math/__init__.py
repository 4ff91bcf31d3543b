"""Decides whether two answers are the same mathematics. The inputs are two texts; the output is yes or no.

``equality`` is the entry: ``answers`` calls it with the row's answer and the model's. It writes both in plain LaTeX
(``notation``) and decides what needs no reading: plain ``numbers``, and what prints alike (``typesetting``). For the
rest it adds braces (``arguments``) and asks ``verifier``, which runs ``child`` in processes of its own, because no
answer may hang or crash a generator. Only these processes import sympy.

In a child, ``comparison`` reads both answers and compares what they say. The readers, from the lowest up: ``tokens``,
``bars`` (absolute values), ``position``, ``commands``, ``expressions`` (sums, products, powers), ``quantities`` and
``units`` (with the lists of ``words.toml``), ``reading`` (lists, sets, relations). They return ``values``.
``comparison`` uses ``relations``, ``same_sets`` and ``same_expressions``. docs/rewards.md lists what counts as equal.
"""
