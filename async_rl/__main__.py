"""Run the ``async-rl`` command as ``python -m async_rl``."""

from async_rl.cli.main import main

if __name__ == "__main__":
    main()
