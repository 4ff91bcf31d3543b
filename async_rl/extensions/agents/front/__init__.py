"""The HTTP endpoint of one generator's agents: a process that speaks HTTP, and the generator's side of it.

``server`` is the process: ``requests`` and ``chat`` read and write bodies, ``conversations`` recognises what a chat
goes on from, ``answers`` reads what the model wrote, and ``remote_programs`` answers what comes over the relay.
``process`` starts it for the generator, and ``messages`` is what the two say to each other.
"""
