"""Bytes between processes: messages and their wire format, frames, addresses and who may connect.

A record or bytes enter; a checked record leaves, or an error that names the malformed part. The queue, the weights and
the code that communicates with child processes call it. It does not depend on roles or the queue's state.
"""
