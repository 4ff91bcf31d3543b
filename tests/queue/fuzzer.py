"""A peer that sends mutants, as a process: ``python -m tests.queue.fuzzer ADDRESS SEED KEYFILE``.

Each line on its input, ``COUNT RATE``, makes it send so many at so many a second and print what came of it (JSON):
``sent``, ``decodable`` (past the outer frame) and ``answers``. It reads every answer, as a legitimate peer would.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time

import zmq

from async_rl.net.keys import ClientKeys
from async_rl.queue.server.sockets import MessageLimits
from tests.queue.mutants import corpus, gets_past_the_frame, mutants


def main() -> None:
    address, seed, key_file = sys.argv[1:]
    os.nice(5)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    ClientKeys.load(key_file).identify(socket)
    socket.connect(address)
    messages = corpus()
    # The first one names the generator that this connection speaks for.
    socket.send_multipart(messages["hello"])
    source, limits = mutants(messages, int(seed)), MessageLimits(1 << 20).wire
    for line in sys.stdin:
        count, rate = map(int, line.split())
        batch = list(itertools.islice(source, count))
        decodable = sum(gets_past_the_frame(frames, limits) for frames in batch)
        print("ready", flush=True)
        answers, started = 0, time.monotonic()
        for number, frames in enumerate(batch):
            # As long as it is too early for this one, answers are read; they are read in any case.
            while True:
                left_s = started + number / rate - time.monotonic()
                if not socket.poll(max(0, int(left_s * 1000))) and left_s <= 0:
                    break
                answers += _read(socket)
            socket.send_multipart(frames)
        print(json.dumps({"sent": count, "decodable": decodable, "answers": answers + _read(socket)}), flush=True)
    socket.close()
    context.term()


def _read(socket: zmq.Socket[bytes]) -> int:
    answers = 0
    while socket.poll(0):
        socket.recv()
        answers += 1
    return answers


if __name__ == "__main__":
    main()
