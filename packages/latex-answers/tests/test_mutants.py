"""No wrong answer that is made out of a right one earns the reward; equal answers in other notations do."""

import json
import signal
from collections.abc import Sequence

import pytest

from latex_answers import equal
from latex_answers.arguments import spelled_out
from latex_answers.comparison import same_answers
from mutants import ANSWERS, DATA, all_answers, mutants
from rewritings import rewritings

EQUAL = {
    (row["answer"], row["mutant"])
    for row in map(json.loads, (DATA / "equal_mutants.jsonl").read_text("utf-8").splitlines())
}
"""Mutants that say the same as the answer. A person checked each; the file has the reasons."""
KINDS = {
    "digit", "digit more", "sign", "variable", "prime", "exponent", "relation", "side", "upright", "command", "bracket",
    "term more", "factor more", "item less", "item more", "items swapped", "dots", "modulus",
}  # fmt: skip


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


def accepted(answers: Sequence[str]) -> tuple[set[tuple[str, str]], dict[str, int]]:
    """The mutants that count as equal, and how many there were of each kind."""
    found: set[tuple[str, str]] = set()
    num: dict[str, int] = {}
    for answer in answers:
        for kind, mutant in mutants(answer):
            num[kind] = num.get(kind, 0) + 1
            if equal_in_time(mutant, answer):
                found.add((answer, mutant))
    return found, num


def test_no_mutant_of_some_right_answers_earns():
    chosen = list(all_answers())[::29]
    found, num = accepted(chosen)
    assert found == {pair for pair in EQUAL if pair[0] in chosen}
    assert sum(num.values()) > 300


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_mutant_of_any_right_answer_earns():
    found, num = accepted(list(all_answers()))
    print(num, f"{len(found)} are equal:", *sorted(found), sep="\n")
    assert found == EQUAL
    assert set(num) == KINDS
    assert sum(num.values()) == 10_618
    assert len(found) == 60


def test_every_answer_of_the_benchmark_equals_itself():
    # Equal texts are equal without a reader, so the reader is asked too. It reads everything here.
    assert len(ANSWERS) == 301
    for answer in ANSWERS:
        assert equal(answer, answer), answer
        assert same_answers(spelled_out(answer), spelled_out(answer)) == "equal", answer


def refused(answers: Sequence[str]) -> list[tuple[str, ...]]:
    """The rewritings of ``answers`` that are not equal to them, each with the answer and its kind."""
    pairs = [(answer, *rewritten) for answer in answers for rewritten in rewritings(answer)]
    assert len(pairs) == 2_608 or answers != ANSWERS
    return [pair for pair in pairs if not equal(pair[2], pair[0])]


def test_right_answers_in_other_notation_earn():
    assert refused(ANSWERS[::7]) == []


@pytest.mark.slow
def test_all_right_answers_in_other_notation_earn():
    assert refused(ANSWERS) == []


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
