"""The queue's rules as a pure state machine: no sockets, no threads, no clock, no disk.

Requests enter as calls of ``learner_requests`` and ``generator_requests``, each with the ``QueueState`` and the time;
leases, batches, verdicts and reports leave. ``server`` calls them, and tests drive them event by event. ``admission``
has the rule for leases. ``groups``, ``leases`` and ``prompts`` are the tables of the state, ``persistence`` writes and
reads it, and the ``ledger`` counts every group, rollout and token.
"""
