"""Agents on other machines: the relay between generators and the programs that play their sessions.

Generators open no port to other machines. So the front of each generator connects to the relay (``server``), a process
beside the queue server that has the run's server keys, and so does ``async-rl agent`` (``proxy``) on any machine. The
fronts offer sessions, the relay hands them to the proxies that ask for one, and then forwards HTTP requests and answers
as messages (``messages``). ``client`` is the connection of both to the relay. ``loopback`` serves HTTP on one machine,
``responses`` are parts of it, and ``start`` is the body of the command.

The relay has no state that matters: if it dies, the sessions that programs have begun fail, and the others are offered
to its successor.
"""
