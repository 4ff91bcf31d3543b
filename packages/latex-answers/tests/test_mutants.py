"""No wrong answer that is made out of a right one of MATH-500 earns the reward, nor does another one's."""

import json
import signal
from collections.abc import Sequence

import pytest

from latex_answers import equal
from latex_answers.arguments import spelled_out
from latex_answers.comparison import same_answers
from mutants import ANSWERS, DATA, mutants

EQUAL = {
    (row["answer"], row["mutant"])
    for row in map(json.loads, (DATA / "equal_mutants.jsonl").read_text("utf-8").splitlines())
}
"""Mutants that say the same as the answer. A person checked each; the file has the reasons."""


def give_up(signum: int, frame: object) -> None:
    raise TimeoutError


def equal_in_time(answer: str, gold: str) -> bool:
    """A digit more may make a power of millions of digits: five seconds of processor time without an end are no."""
    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, 5)
    try:
        return equal(answer, gold)
    except TimeoutError:
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def accepted(answers: Sequence[str]) -> set[tuple[str, str]]:
    """The mutants that count as equal."""
    return {(answer, mutant) for answer in answers for _, mutant in mutants(answer) if equal_in_time(mutant, answer)}


def test_no_mutant_of_some_right_answers_earns():
    chosen = ANSWERS[::16]
    assert sum(len(list(mutants(answer))) for answer in chosen) > 300
    assert accepted(chosen) == {pair for pair in EQUAL if pair[0] in chosen}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_mutant_of_any_right_answer_earns():
    assert sum(len(list(mutants(answer))) for answer in ANSWERS) == 5_188
    assert accepted(ANSWERS) == EQUAL


def test_every_answer_of_the_benchmark_equals_itself():
    # Equal texts are equal without a reader, so the reader is asked too. It reads everything here.
    assert len(ANSWERS) == 301
    for answer in ANSWERS:
        assert equal(answer, answer), answer
        assert same_answers(spelled_out(answer), spelled_out(answer)) == "equal", answer


SAME = {
    ("\\frac{1}{4}", "\\frac14"), ("10,\\!080", "10080"), ("2 \\sqrt{5}", "2\\sqrt{5}"), ("1,-2", "-2,1"),
    # Lenient on purpose, see README.md: a unit that one side lacks, a base, a name, brackets of a tuple.
    ("90^\\circ", "90"), ("120^\\circ", "120"), ("36", "36^\\circ"), ("30^\\circ", "30"), ("36", "\\$36"),
    ("15", "15\\mbox{ cm}^2"), ("40_9", "40"), ("5", "x=5"), ("(-2,1)", "-2,1"),
    ("\\pi", "180^\\circ"),  # an angle in radians and in degrees
}  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_answer_of_the_benchmark_equals_another():
    same = {(one, other) for index, one in enumerate(ANSWERS) for other in ANSWERS[index + 1 :] if equal(other, one)}
    assert same == SAME
