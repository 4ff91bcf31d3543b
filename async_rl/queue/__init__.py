"""The queue: a separate process that grants leases, stores the returned groups, and sends batches to the learner.

Prompts and configuration enter at its start. Then generators send groups, and the learner takes batches and
acknowledges them. ``core`` has the rules, ``storage`` the disk, ``server`` the process and its sockets, ``client`` the
clients for learner and generators. ``messages`` has the records that pass between server and clients.
"""
