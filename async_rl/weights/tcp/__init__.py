"""The transport ``tcp``: every generator pulls a version at its own pace.

In come staged buckets in shared memory at the learner (``sender``); out come verified buckets at each generator
(``receiver``). The bytes are served by a separate process (``server``), which ``sender`` starts and instructs.
``protocol`` is what the server exchanges with both; ``delta`` computes the difference between two versions. The
publisher and the generator's receive worker use them through ``weights.transport``.
"""
