"""The queue: a process that gives leases to generators, stores the returned groups, and sends batches to the learner.

A lease is the permission to sample one group of rollouts. The queue server reads the prompts and the configuration when
it starts. ``core`` has the rules, ``storage`` the files on disk, ``server`` the process and its sockets, ``client`` the
clients for learner and generators, and ``messages`` the records that server and clients exchange.
"""
