"""Versions of the weights, from the learner to every generator.

The learner (``async_rl/learner``) copies its gathered tensors into ``Staging`` and hands the staged version to
``Publisher``. A generator (``async_rl/generator``) follows announcements with ``Receiver`` and gets verified tensors.

The path of a version, by module:

- ``manifest``: what a version consists of, and its digests. ``memory``: host memory that processes share.
  ``staging``: the learner's memory for versions.
- ``publisher``: the learner's thread. ``scheduler``: decides who gets what, as a pure state machine.
  ``transfer_manager``: carries out its decisions.
- ``control``: the messages of both sides, and their sockets.
- ``transport``: the table of transports and the protocols that they implement. ``collective/`` (NCCL and gloo) and
  ``tcp/`` implement them. ``server_process``: the learner's handle of the processes that send the bytes.
- ``receiver``: the generator's control thread. ``receive_worker``: its transfer thread and its memory.
  ``engine_ranks``: the workers of an engine, where they receive collectives themselves.
"""
