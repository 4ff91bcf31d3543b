"""Versions of the weights, from the learner to every generator.

The learner (``async_rl/learner``) copies its gathered tensors into ``Staging`` and hands the staged version to
``Publisher``. A generator (``async_rl/generator``) follows announcements with ``Receiver`` and gets verified tensors.

The path of a version, by module:

- ``manifest``: what a version consists of, and its digests. ``memory``: host memory that processes share.
  ``staging``: the learner's memory for versions.
- ``scheduler``: decides who gets what, as a pure state machine. ``control``: the messages of both sides, and their
  sockets.
- ``transport``: the protocols that transports implement. ``collective/`` (NCCL and gloo) and ``tcp/`` implement them.
  ``server_process``: the learner's handle of the processes that send the bytes.
- ``receive_buffers``: the generator's memory for versions.
- ``channel/``: the learner's publisher, the generator's receiver, and the table of transports.
"""
