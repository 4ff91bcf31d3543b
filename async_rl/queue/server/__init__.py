"""The queue server: a process around the pure state machine of ``queue.core``.

Requests of learner and generators enter at one socket; replies, notices and batches leave. ``start`` starts a server or
finds the one that runs (called by the command ``async-rl queue``, ``launch`` and the learner); ``server`` is its loop,
``sockets`` the socket with its limits, ``clients`` the state of each peer, ``handlers`` one function per request.
"""
