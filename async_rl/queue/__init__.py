"""The queue: a separate process that grants leases, stores the returned groups, and sends batches to the learner.

The queue reads prompts and configuration at its start. Then generators send groups, and the learner takes batches and
acknowledges them. ``core`` has the rules, ``storage`` the files on disk, ``server`` the process and its sockets,
``client`` the clients for learner and generators, and ``messages`` the records that server and clients exchange.
"""
