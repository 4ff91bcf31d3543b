"""The queue's storage: encoded groups (payloads) and the records of its journal.

The core hands payloads to a ``PayloadStore`` and notes its changes in ``Changes``; the server commits both to the
``Journal`` once a turn, and loads them after a restart. The journal keeps payloads in segment files.
"""
