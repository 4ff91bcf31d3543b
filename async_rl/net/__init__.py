"""Communication between processes: the wire format of messages, streams, addresses, and the keys of allowed clients.

Encoding turns records into bytes; decoding returns checked records, or raises an error that names the malformed part.
The queue, the weights and the code for child processes call it. It does not depend on roles or the queue's state.
"""
