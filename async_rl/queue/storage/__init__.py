"""The queue's data on disk: payloads (the bytes of encoded groups) and a journal of all small records.

The core stores payloads in a ``PayloadStore`` and collects its changes in ``Changes``. The server writes both to the
``Journal`` once in each turn of its loop, and loads them after a restart. The journal keeps each payload in a
file.
"""
