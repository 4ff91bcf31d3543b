"""The quickstart's task: rows and a model made on the spot (``sums``), and the config of its run.

Tests, benchmarks and examples use it, too.
"""
