"""Agents: programs that ask a generator's HTTP endpoint for answers, and whose calls become one rollout of a lease.

``start`` opens what the generator's loop needs. ``rollouts`` plays leases: a ``session`` is one rollout, whose
``calls`` become token sequences in ``session_tokens`` and messages in ``transcript``. ``front/`` is the endpoint,
``programs/`` runs agents here, ``outside_programs`` offers sessions to those on other machines, and ``relay/`` is how
they are reached. ``checks`` try an agent before a start, and ``commands`` has ``relay`` and ``agent``.
"""
