"""Tools for every process of a run: start children, end with the parent, stop on signals, import the user's code.

The folder also compares the versions of installed packages and the source of user code between machines, and has points
at which tests can stop a process. All roles (learner, queue, generators) use it.
"""
