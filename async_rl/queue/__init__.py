"""The queue: a process of its own that grants leases, stores the returned groups, and hands batches to the learner.

Prompts and configuration enter at its start; then generators send groups, and the learner takes batches and
acknowledges them. ``core`` has the rules, ``storage`` the disk, ``server`` the process and its sockets, ``client`` what
learner and generators call. ``messages`` are the records that pass between server and clients.
"""
