"""Run async-rl from a checkout that is not installed: ``python cli.py launch configs/quickstart.toml``."""

import os
import sys

from async_rl.__main__ import check_installation

if __name__ == "__main__":
    check_installation()
    from async_rl.process.child import PACKAGE_SOURCES, package_environment

    # Child processes must be able to import async_rl, and what it ships, in any working directory.
    os.environ.update(package_environment())
    sys.path[1:1] = PACKAGE_SOURCES
    from async_rl.cli.main import main

    main()
