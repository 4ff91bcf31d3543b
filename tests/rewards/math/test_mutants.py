"""No wrong answer that is made out of a right one earns the reward; equal answers in other notations do."""

import json
from collections.abc import Iterator, Sequence

import pytest

from async_rl.rewards.math.verifier import MathVerifier
from latex_answers.arguments import spelled_out
from latex_answers.equality import answers_equal
from tests.rewards.math.mutants import ANSWERS, DATA, all_answers, mutants
from tests.rewards.math.rewritings import rewritings

EQUAL = {
    (row["answer"], row["mutant"])
    for row in map(json.loads, (DATA / "equal_mutants.jsonl").read_text("utf-8").splitlines())
}
"""Mutants that say the same as the answer. A person checked each; the file has the reasons."""
MIN_ACCEPTED = 0.994
KINDS = {
    "digit", "digit more", "sign", "variable", "prime", "exponent", "relation", "side", "upright", "command", "bracket",
    "term more", "factor more", "item less", "item more", "items swapped", "dots", "modulus",
}  # fmt: skip


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    verifier = MathVerifier()
    yield verifier
    verifier.close()


def accepted(verifier: MathVerifier, answers: Sequence[str]) -> tuple[set[tuple[str, str]], dict[str, int]]:
    """The mutants that count as equal, and how many there were of each kind."""
    equal: set[tuple[str, str]] = set()
    num: dict[str, int] = {}
    for answer in answers:
        for kind, mutant in mutants(answer):
            num[kind] = num.get(kind, 0) + 1
            if answers_equal(answer, mutant, verifier=verifier, time_limit_s=5.0):
                equal.add((answer, mutant))
    return equal, num


def test_no_mutant_of_some_right_answers_earns(verifier: MathVerifier):
    chosen = list(all_answers())[::29]
    equal, num = accepted(verifier, chosen)
    assert equal == {pair for pair in EQUAL if pair[0] in chosen}
    assert sum(num.values()) > 300


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_mutant_of_any_right_answer_earns(verifier: MathVerifier):
    equal, num = accepted(verifier, list(all_answers()))
    print(num, f"{len(equal)} are equal:", *sorted(equal), sep="\n")
    assert equal == EQUAL
    assert set(num) == KINDS
    assert sum(num.values()) > 10_000
    assert verifier.counts["crashed"] == 0


def test_every_answer_of_the_benchmark_equals_itself(verifier: MathVerifier):
    # Equal texts are equal without a reader, so the reader is asked too. It reads everything here.
    assert len(ANSWERS) == 301
    for answer in ANSWERS:
        assert answers_equal(answer, answer, verifier=verifier, time_limit_s=5.0), answer
        assert verifier.ask(spelled_out(answer), spelled_out(answer), 5.0) == "equal", answer


def share_accepted(verifier: MathVerifier, answers: Sequence[str]) -> tuple[float, list[tuple[str, ...]]]:
    pairs = [(answer, *rewritten) for answer in answers for rewritten in rewritings(answer)]
    refused = [pair for pair in pairs if not answers_equal(pair[0], pair[2], verifier=verifier, time_limit_s=5.0)]
    return 1 - len(refused) / len(pairs), refused


def test_right_answers_in_other_notation_earn(verifier: MathVerifier):
    share, refused = share_accepted(verifier, ANSWERS[::7])
    assert share >= MIN_ACCEPTED, refused


@pytest.mark.slow
def test_all_right_answers_in_other_notation_earn(verifier: MathVerifier):
    share, refused = share_accepted(verifier, ANSWERS)
    assert share >= MIN_ACCEPTED, refused


SAME = {
    ("\\frac{1}{4}", "\\frac14"), ("10,\\!080", "10080"), ("2 \\sqrt{5}", "2\\sqrt{5}"), ("1,-2", "-2,1"),
    # Lenient on purpose, see docs/rewards.md: a unit that one side lacks, a base, a name, brackets of a tuple.
    ("90^\\circ", "90"), ("120^\\circ", "120"), ("36", "36^\\circ"), ("30^\\circ", "30"), ("36", "\\$36"),
    ("15", "15\\mbox{ cm}^2"), ("40_9", "40"), ("5", "x=5"), ("(-2,1)", "-2,1"),
    ("\\pi", "180^\\circ"),  # an angle in radians and in degrees
}  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_answer_of_the_benchmark_equals_another(verifier: MathVerifier):
    same = {
        (one, other)
        for index, one in enumerate(ANSWERS)
        for other in ANSWERS[index + 1 :]
        if answers_equal(one, other, verifier=verifier, time_limit_s=5.0)
    }
    assert same == SAME
