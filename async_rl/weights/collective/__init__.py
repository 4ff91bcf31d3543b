"""The transports ``nccl`` and ``gloo``: broadcast a version of the weights to several generators at once.

What goes in is the learner's staging memory, which holds the version in buckets. What comes out is the same buckets,
verified, at each generator. ``server`` is a separate process, the broadcaster: rank 0 of every communicator. ``sender``
is the learner's side, which starts and instructs that process. ``receiver`` is the generator's side. ``protocol`` has
the messages between learner and broadcaster. ``library`` has the protocol of a communication library, and
``Communicator``, which puts deadlines around its calls. ``gloo`` and ``nccl`` implement the protocol; ``libraries`` is
their table.

The learner itself is never a rank. So a library that hangs, or ends its process, costs the learner nothing but this
version's broadcast: the broadcaster is killed and started again, and the generators pull.

An epoch is the number of a communicator. Collectives authenticate nobody, so they are for trusted networks only.
"""
