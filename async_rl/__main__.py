"""``python -m async_rl ...`` is the ``async-rl`` command."""

from async_rl.cli.main import main

if __name__ == "__main__":
    main()
