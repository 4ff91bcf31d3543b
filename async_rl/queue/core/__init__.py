"""The rules of the queue: functions that change a ``QueueState`` and use no sockets, threads, clock or disk.

``learner_requests`` and ``generator_requests`` have a function for each request. It gets the state and the time,
changes the state and returns the answer. The server calls these functions, and tests call them event by event.
``admission`` decides how many leases are granted. ``groups``, ``leases`` and ``prompts`` are the tables of the state,
``persistence`` writes and reads the state, and ``ledger`` counts every group, rollout and token.
``examples/heart.py`` calls them in one process.
"""
