"""The command line's answer to a mistake of the user: exit code 2, one message and nothing else."""

from __future__ import annotations

import pytest

from async_rl.cli import main as cli


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the message of the command ``arguments``, which must be refused."""
    with pytest.raises(SystemExit) as leaving:
        cli.main(list(arguments))
    printed = capsys.readouterr()
    assert leaving.value.code == 2, printed
    assert "Traceback" not in printed.err
    assert printed.out == ""
    return printed.err
