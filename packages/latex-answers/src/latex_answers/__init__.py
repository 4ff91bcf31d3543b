r"""Decides whether two answers in LaTeX are the same mathematics.

``equal`` says yes or no, ``compare`` also why not, and ``compare_by`` lets a caller choose where the part runs that may
take long. ``parse`` reads one answer, ``canonical_form`` gives answers that are alike one key, and ``boxed_answer``
finds the answer in a model's text. ``py.typed``: all have types.

``equality`` is the entry. It writes both answers in plain LaTeX (``notation``) and decides what needs no reading: plain
``numbers``, and what prints alike (``typesetting``). For the rest it adds braces (``arguments``) and calls
``comparison``, which reads both and compares what they say. Only ``comparison`` and the readers import sympy.

The readers, from the lowest up: ``tokens``, ``bars`` (absolute values), ``position``, ``commands``, ``expressions``
(sums, products, powers), ``quantities`` and ``units`` (with the lists of ``words.toml``), ``reading`` (lists, sets,
relations). They return ``values``. ``comparison`` uses ``relations``, ``same_sets`` and ``same_expressions``. README.md
lists what counts as equal.
"""

from latex_answers.boxes import boxed_answer
from latex_answers.equality import MAX_ANSWER_CHARS, canonical_form, compare, compare_by, equal, parse
from latex_answers.finding import Finding, UnreadableError

__version__ = "0.1.0"
__all__ = [
    "MAX_ANSWER_CHARS",
    "Finding",
    "UnreadableError",
    "__version__",
    "boxed_answer",
    "canonical_form",
    "compare",
    "compare_by",
    "equal",
    "parse",
]
