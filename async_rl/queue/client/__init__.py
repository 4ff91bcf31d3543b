"""Both clients of the queue, for rank 0 of the learner and for a generator (``clients``).

Calls enter; records of ``queue.messages`` are sent over ``connection``, which repeats a request until it is answered.
"""
