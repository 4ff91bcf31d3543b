"""Communication between processes: message encoding, byte streams, addresses, and the keys of allowed clients.

Encoding turns records into bytes. Decoding returns checked records, or raises an error that names the malformed part.
The queue, the weights' transports and the code for child processes use this folder. It knows nothing about roles or
about the queue's state.
"""
