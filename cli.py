"""Run async-rl from a checkout that is not installed: ``python cli.py launch configs/quickstart.toml``."""

import os

from async_rl.__main__ import check_installation

if __name__ == "__main__":
    check_installation()
    from async_rl.cli.main import main
    from async_rl.process.child import package_environment

    # Child processes must be able to import async_rl in any working directory.
    os.environ.update(package_environment())
    main()
