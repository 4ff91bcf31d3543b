"""The queue's rules as a pure state machine: no sockets, no threads, no clock, no disk.

Requests enter as calls of ``Buffer``, with the time; leases, batches, verdicts and reports leave. ``server`` calls it.
``admission`` has the rule for leases, ``lease_scheduler`` grants them, ``ingest`` takes groups in, ``batches`` hands
them to the learner. All of them change one ``QueueState``, which ``persistence`` writes and reads. The ``ledger``
counts every group, rollout and token.
"""
