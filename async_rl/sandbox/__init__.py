"""Runs one untrusted Python program at a time in an isolation of its own. Linux only.

Enters a ``Program`` and its ``Limits``; leaves what it printed or returned, and how it ended. The code reward calls
``sandbox.Sandbox``, which starts the ``launcher`` process; that forks a ``child`` for every program. What a program is
expected to print never enters the launcher.
"""
