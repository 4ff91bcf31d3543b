"""No check can hang the doctor, nor end it."""

import threading

import pytest

from async_rl.errors import ConfigError
from async_rl.launch.checks.check_process import CheckProcess
from async_rl.launch.checks.doctor import run_in_thread
from async_rl.launch.checks.finding import Finding, exit_code, findings_json, print_table


def test_a_check_that_does_not_end_is_a_red_row_and_the_next_goes_on():
    release = threading.Event()
    (row,) = run_in_thread("stuck", lambda: [Finding("stuck", "OK", str(release.wait()))], 0.05)
    release.set()
    assert (row.check, row.state) == ("stuck", "FAIL")
    assert "did not end within 0.05 s" in row.found
    assert row.fix


@pytest.mark.parametrize("error", [ConfigError("data.train: needed"), ZeroDivisionError("by zero")])
def test_what_a_check_raises_is_a_red_row(error: Exception):
    def raises() -> list[Finding]:
        raise error

    (row,) = run_in_thread("odd", raises)
    assert (row.state, str(error) in row.found) == ("FAIL", True)


def test_the_remedy_in_an_error_is_the_fix_of_its_row():
    one, many = ConfigError("run.dir: a; b, got c; choose another"), ConfigError("two mistakes:\n  a: wrong; b\n  c: d")
    assert Finding.of_message("config", one) == Finding("config", "FAIL", "run.dir: a; b, got c", fix="choose another")
    assert Finding.of_message("config", many) == Finding("config", "FAIL", str(many))


def process(function: str, deadline_s: float = 60.0, **given: object) -> CheckProcess:
    return CheckProcess(function, f"tests.launch.checks.children:{function}", given, deadline_s)


def test_rows_come_back_from_a_process_whatever_it_prints():
    assert process("fine", number=3).findings() == [Finding("fine", "OK", "3")]


def test_a_process_that_hangs_is_killed_at_its_deadline():
    hanging = process("hangs", deadline_s=0.5)
    (row,) = hanging.findings()
    assert (row.state, "did not end" in row.found) == ("FAIL", True)
    assert hanging._process.returncode == -9


def test_a_process_that_dies_is_a_red_row_with_its_last_words():
    (row,) = process("dies").findings()
    assert (row.state, "exit code 7" in row.found, row.details) == ("FAIL", True, "the last words")


def test_a_users_error_in_a_process_is_a_red_row():
    (row,) = process("refuses", check="model").findings()
    assert (row.state, row.found) == ("FAIL", "no such model, model")


ROWS = [
    Finding("a", "OK", "fine"),
    Finding("b", "WARN", "hm", fix="look"),
    Finding("c [x]", "FAIL", "bad [y]", fix="repair it", details="d"),
]


def test_the_table_has_a_fix_beside_every_red_row_and_json_is_one_object(capsys: pytest.CaptureFixture[str]):
    print_table(ROWS)
    text = capsys.readouterr().out
    for word in ("OK", "WARN", "FAIL", "bad [y]", "c [x]", "fix: repair it", "fix: look", "1 check failed, 1 warning"):
        assert word in text
    assert (exit_code(ROWS), exit_code(ROWS[:2])) == (1, 0)
    plain = findings_json(ROWS)
    assert (plain["ok"], [row["state"] for row in plain["rows"]]) == (False, ["OK", "WARN", "FAIL"])
