"""The queue server: a process around the pure state machine of ``queue.core``.

Requests of learner and generators enter at one socket; replies, notices and batches leave. ``start`` starts a server or
finds the one that runs (called by the command ``async-rl queue``, ``launch`` and the learner); ``server`` is its loop
with the pending requests, ``sockets`` the socket with its limits, ``handlers`` one function per request.
"""
