"""The two ends of the weights channel: the learner's publisher and the generators' receivers.

- ``publisher``: the learner's thread. ``transfer_manager``: carries out the decisions of its scheduler.
- ``receiver``: the generator's control thread. ``receive_worker``: its transfer thread. ``engine_ranks``: the workers
  of an engine, where they receive collectives themselves.
- ``transports``: the table of transports, from which both ends take theirs.
"""
