"""A peer that sends mutants, as a process: ``python -m tests.queue.fuzzer ADDRESS KEYFILE``.

Each line on its input is JSON: ``seed``, ``count`` and ``rate`` of the mutants to send, and ``recorded``, messages of
others (lists of frames, as base64) to send unchanged among them. It prints what came of it as JSON: ``sent``,
``decodable`` (past the outer frame) and ``answers``. It reads every answer, as a legitimate peer would.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import random
import sys
import time

import zmq

from async_rl.net.keys import ClientKeys
from async_rl.queue.server.sockets import MessageLimits
from tests.fuzz import REPLAYED
from tests.queue.mutants import Frames, corpus, gets_past_the_frame, mutants


def main() -> None:
    address, key_file = sys.argv[1:]
    os.nice(5)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    ClientKeys.load(key_file).identify(socket)
    socket.connect(address)
    messages = corpus()
    # The first one names the generator that this connection speaks for.
    socket.send_multipart(messages["hello"])
    limits = MessageLimits(1 << 20).wire
    for line in sys.stdin:
        order = json.loads(line)
        rate: int = order["rate"]
        batch = _with_replays(
            list(itertools.islice(mutants(messages, order["seed"]), order["count"])),
            [tuple(map(base64.b64decode, frames)) for frames in order["recorded"]],
            random.Random(order["seed"]),
        )
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
        print(json.dumps({"sent": len(batch), "decodable": decodable, "answers": answers + _read(socket)}), flush=True)
    socket.close()
    context.term()


def _with_replays(batch: list[Frames], recorded: list[Frames], rng: random.Random) -> list[Frames]:
    return [rng.choice(recorded) if recorded and rng.random() < REPLAYED else frames for frames in batch]


def _read(socket: zmq.Socket[bytes]) -> int:
    answers = 0
    while socket.poll(0):
        socket.recv()
        answers += 1
    return answers


if __name__ == "__main__":
    main()
