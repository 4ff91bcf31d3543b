"""Runs untrusted Python programs, each isolated from the machine and from the others. Linux only.

Enters a ``Program`` and its ``Limits``; leaves what it printed or returned, and how it ended. The code reward calls
``sandbox.Sandbox``, which starts the ``launcher`` process; that forks a ``child`` for every program. What a program is
expected to print never enters the launcher.
"""
