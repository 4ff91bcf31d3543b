"""Helpers for every process of a run: start children, end with the parent, import the user's code.

It also has the fault points of tests, and checks that imported code has the expected digest. Every folder of a higher
layer calls this one.
"""
