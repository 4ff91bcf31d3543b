"""The ``async-rl`` command: parse its arguments, call the other folders, print messages, and return an exit code.

``main.main`` is the entry point. The installed command and ``cli.py`` call it.
"""
