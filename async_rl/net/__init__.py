"""Communication between processes: message encoding, byte streams, addresses, limits on connections, and keys.

Encoding turns records into bytes. Decoding returns checked records, or raises an error that names the malformed part.
The queue, the weights' transports and the code for child processes use this folder. It knows nothing about roles or
about the queue's state.
"""
