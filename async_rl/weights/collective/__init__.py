"""The transports ``nccl`` and ``gloo``: one broadcast of a version to all members of an epoch.

In come staged buckets at the learner (``sender``); out come verified buckets at each generator (``receiver``). Both
use one rank of a ``communicator``. The publisher and the generator's receive worker use them through
``weights.transport``.
"""
