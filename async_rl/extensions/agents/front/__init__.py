"""The HTTP endpoint of one generator's agents: a process that speaks HTTP, and the generator's side of it.

``server`` is the process: ``requests`` and ``chat`` read and write bodies, ``dialects`` are the APIs in which chats are
asked for, ``conversations`` recognises what a chat goes on from, ``answers`` reads what the model wrote, by its form
(``forms``), ``demands`` are forms that an answer must have, and ``remote_programs`` answers what comes over the relay.
``process`` starts it for the generator, and ``messages`` is what the two say to each other.
"""
