"""Decides whether two answers are the same mathematics. The inputs are two texts; the output is yes or no.

``equality`` is the entry. It writes both in plain LaTeX
(``notation``) and decides what needs no reading: plain ``numbers``, and what prints alike (``typesetting``). For the
rest it adds braces (``arguments``) and asks a ``Verifier``, which runs ``comparison`` where it may take long.

``comparison`` reads both answers and compares what they say. The readers, from the lowest up: ``tokens``,
``bars`` (absolute values), ``position``, ``commands``, ``expressions`` (sums, products, powers), ``quantities`` and
``units`` (with the lists of ``words.toml``), ``reading`` (lists, sets, relations). They return ``values``.
``comparison`` uses ``relations``, ``same_sets`` and ``same_expressions``. docs/rewards.md lists what counts as equal.
"""

__version__ = "0.1.0"
