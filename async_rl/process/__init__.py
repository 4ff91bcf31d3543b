"""Functions for every process of a run: start children, end with the parent, stop on signals, import the user's code.

The folder also finds the versions of installed packages and the digests of the user's code, which learner and
generators compare. It has named points at which tests can stop a process. Learner, queue server and generators use it.
"""
