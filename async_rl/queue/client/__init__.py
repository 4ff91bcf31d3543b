"""The clients of the queue: one for the learner's rank 0, one for a generator.

Each method of a client sends a record of ``queue.messages``. ``connection`` repeats the request until the reply comes.
"""
