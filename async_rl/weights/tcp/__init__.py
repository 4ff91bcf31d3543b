"""The transport ``tcp``: every generator pulls a version at its own pace.

In come staged buckets in shared memory at the learner (``sender``); out come verified buckets at each generator
(``receiver``). The bytes are served by a process of their own (``server``), which the learner starts and instructs
(``server_process``). ``protocol`` is what the two ends of a pull send each other; ``delta`` computes the difference
between two versions. The publisher and the generator's receive worker use them through ``weights.transport``.
"""
