"""Runs untrusted Python programs, each isolated from the machine and from other programs. It works only on Linux.

The input is a ``Program`` and its ``Limits``. The output is what the program printed or returned, and how it ended. The
code reward calls ``sandbox.Sandbox``, which starts the ``launcher`` process. The launcher forks a ``child`` process for
every program. The output that a program should print is never sent to the launcher.
"""
