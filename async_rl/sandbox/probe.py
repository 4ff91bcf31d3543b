"""A harmless program that tries what must not work. The sandbox runs it once before it is trusted with others.

Its input is the path of a file that it must not find.
"""

from __future__ import annotations

PROBE_ANSWER = b"confined\n"

PROBE = """
import os, socket, threading

path = input()

def succeeds(attempt):
    try:
        attempt()
    except (OSError, RuntimeError):
        return False
    return True

def start_too_many_threads():
    release = threading.Event()
    threads = [threading.Thread(target=release.wait, daemon=True) for _ in range(64)]
    try:
        for thread in threads:
            thread.start()
    finally:
        release.set()

attempts = {
    "it can open a socket": lambda: socket.socket(),
    "it can start a process": lambda: os._exit(0) if os.fork() == 0 else None,
    "it can run another program": lambda: os.execv("/usr/bin/true", ["true"]),
    "it sees processes": lambda: os.listdir("/proc"),
    "it sees a file of this machine": lambda: os.stat(path),
    "it sees the configuration of the machine": lambda: os.listdir("/etc"),
    "it can write outside its directory": lambda: open("/probe", "w"),
    "it can start any number of threads": start_too_many_threads,
    "it is not alone in its process namespace": lambda: None if os.getpid() != 1 else os.stat("/nowhere"),
}
found = [what for what, attempt in attempts.items() if succeeds(attempt)]
with open("scratch", "w") as file:
    file.write("x")
print("; ".join(found) or "confined")
"""
