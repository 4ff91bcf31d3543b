"""The queue's storage: encoded groups (payloads) and the records of its journal.

The core stores payloads in a ``PayloadStore`` and records its changes in ``Changes``. The server commits both to the
``Journal`` once per turn of its loop, and loads them after a restart. The journal keeps payloads in segment files.
"""
