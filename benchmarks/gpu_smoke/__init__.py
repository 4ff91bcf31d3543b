"""One command that runs every GPU path of async-rl, and prints a line for each: ``python -m benchmarks.gpu_smoke``.

``__main__`` runs each case in a process of its own, under a deadline, and prints the table. ``case`` says what a case
is. The cases are in ``attention``, ``engine``, ``transfer`` and ``runs``. A case that needs what the machine has not is
listed as not run. On a machine without a GPU the cases that don't need one run on the CPU, in small, which tests
the cases themselves.
"""
