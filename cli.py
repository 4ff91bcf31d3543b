"""Run async-rl from a checkout that is not installed: ``python cli.py launch configs/quickstart.toml``."""

from async_rl.cli import main

if __name__ == "__main__":
    main()
