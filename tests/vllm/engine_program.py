"""A process that starts an engine, samples without end, and says so on its output. Killed by ``test_processes``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from async_rl.generator.vllm.backend import VllmBackend
from tests.generator.leases import submit
from tests.vllm.tiny import make_config, weights_of, write_files


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        backend = VllmBackend.from_files(write_files(Path(directory)), make_config(), device="cpu")
        backend.activate(0, weights_of(0))
        number = 0
        while True:
            print(f"tokens {backend.num_tokens}", flush=True)
            if not backend.num_running:
                number += 1
                submit(backend, str(number), group_size=32, max_new_tokens=400, temperature=0.5)
            backend.step()


if __name__ == "__main__":
    main()
