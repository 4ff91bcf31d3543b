"""Both clients of the queue: ``learner_client`` for rank 0 of the learner, ``generator_client`` for a generator.

Calls enter; records of ``queue.messages`` are sent over ``connection``, which repeats a request until it is answered.
"""
