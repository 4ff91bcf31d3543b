"""Run async-rl from a checkout that is not installed: ``python cli.py launch configs/quickstart.toml``."""

import os

from async_rl.cli.main import main
from async_rl.process.child import package_environment

if __name__ == "__main__":
    # A learner starts a queue server, a reward its verifier: they find the package wherever this was called from.
    os.environ.update(package_environment())
    main()
