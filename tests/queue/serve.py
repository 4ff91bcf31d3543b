"""A queue server on made-up rows, as a process: ``python -m tests.queue.serve CONFIG [--run-id ID] [--insecure]``.

``--rows N`` sets the number of training rows. Tests that need no command of their own fork it instead:
``tests.queue.conftest``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from async_rl.config.loading import load_config
from async_rl.errors import UserError
from async_rl.queue.server.server import QueueServer
from async_rl.queue.server.start import ENDS_WELL, journal_directory, serve_until_signal
from async_rl.queue.storage.journal import Journal
from tests.queue.builders import rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--run-id", default="")
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--orphan-s", type=float)
    options = parser.parse_args(arguments)
    config = load_config(options.config)
    try:
        server = QueueServer(
            config, rows(options.rows), {"test": rows(2)}, open_journal=partial(Journal, journal_directory(config)),
            run_id=options.run_id, insecure=options.insecure, orphan_s=options.orphan_s,
        )  # fmt: skip
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print("ended:", reason := serve_until_signal(server), flush=True)
    return int(reason not in ENDS_WELL)


if __name__ == "__main__":
    sys.exit(main())
