"""Both clients of the queue, for rank 0 of the learner and for a generator (``clients``).

A call sends a record of ``queue.messages`` through ``connection``, which repeats the request until it is answered.
"""
