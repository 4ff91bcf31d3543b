"""The queue server: the process that owns the queue's state and talks to the learner and the generators.

All requests come through one socket, and replies, notices and batches leave through it. ``start`` starts a server or
finds the running one (for the command ``async-rl queue``, ``launch`` and the learner). ``server`` has the loop,
``durable`` the state with its journal, ``pending`` what waits, ``sockets`` the socket and its limits, and ``handlers``
a function for each request. The rules are in ``queue.core``.
"""
