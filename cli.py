"""Run async-rl from a checkout that is not installed: ``python cli.py launch configs/quickstart.toml``."""

import os
from pathlib import Path

from async_rl.cli.main import main

if __name__ == "__main__":
    # A learner starts a queue server, a reward its verifier: they find the package wherever this was called from.
    paths = (str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    main()
