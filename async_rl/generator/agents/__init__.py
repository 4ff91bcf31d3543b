"""Agents: programs that ask a generator's HTTP endpoint for answers, and whose calls become one rollout of a lease.

``front`` is the process that speaks HTTP: ``requests`` and ``chat`` read and write bodies, ``conversations`` recognises
what a chat goes on from, and ``answers`` reads what the model wrote. ``front_process`` is the generator's side of it,
and ``messages`` what the two say to each other. ``session`` keeps the tokens of one rollout. ``rollouts`` plays leases
with all of them.
"""
