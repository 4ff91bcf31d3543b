"""Bytes between processes: messages and their wire format, frames, addresses and who may connect.

Enters a record or bytes; leaves a checked record, or an error that names what was malformed. The queue, the weights and
the code that talks to child processes call it. It knows neither roles nor the queue's state.
"""
