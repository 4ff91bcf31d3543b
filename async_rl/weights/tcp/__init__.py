"""The transport ``tcp``: every generator fetches ("pulls") a version of the weights from the learner at its own pace.

What goes in is the learner's staging memory, which holds the version in buckets. What comes out is the same buckets,
verified, at each generator. ``server`` is a separate process that serves the bytes. ``sender`` is the learner's side,
which starts and instructs that process. ``receiver`` is the generator's side. ``protocol`` has the messages that the
server exchanges with both sides. ``delta`` computes the difference between two versions. The publisher and the
generator's receive worker use all this through ``weights.channel``.
"""
