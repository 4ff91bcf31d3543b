"""Where an answer in a box is found in a model's text."""

import time

import pytest

from latex_answers import boxed_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} no, \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{a \\}", "a \\\\"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\fbox{3} \boxed{5}", "5"),
        (r"\boxed {72}", "72"),
        ("\\boxed\n{72}", "72"),
        (r"$\boxed72$.", "72"),
        (r"\boxed-1.5", "-1.5"),
        (r"so \fbox{72}", "72"),
        (r"\boxed{72} (in \boxed{})", "72"),
        (r"\\boxed{72}", "72"),
    ],
)
def test_the_last_box_is_the_answer(text: str, answer: str):
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"the values are $\boxed{3}$ and $\boxed{5}$.", "3, 5"),
        (r"\boxed{3}, \boxed{5}, or \boxed{7}", "3, 5, 7"),
        (r"\boxed{-2} \quad \text{and} \quad \boxed{1}", "-2, 1"),
        (r"$x = \boxed{3}$ and $y_1=\boxed{5}$", "3, 5"),
        (r"$(x, y) = (\boxed{3}, \boxed{5})$", "3, 5"),
        (r"(a) \boxed{3} (b) \boxed{5}", "3, 5"),
        ("\\boxed{3}\n\n\\boxed{5}", "3, 5"),
        ("\\boxed{3}\n\n\\boxed{3}", "3"),
        (r"first \boxed{1}, then $\boxed{3}$ and $\boxed{5}$", "3, 5"),
        (r"\boxed{1} gives \boxed{2}", "2"),
        (r"\boxed{x = \boxed{2}}", "2"),
    ],
)
def test_boxes_with_only_signs_and_and_or_or_between_them_are_one_list(text: str, answer: str):
    assert boxed_answer(text) == answer


@pytest.mark.parametrize("command", ["phantom", "hphantom", "vphantom", "cancel", "xcancel", "sout"])
def test_a_box_that_is_not_printed_or_struck_out_is_no_answer(command: str):
    hidden = rf"\{command}{{so $\boxed{{\frac{{1}}{{2}}}}$}}"
    assert boxed_answer(hidden) is None
    assert boxed_answer(rf"\boxed{{5}} {hidden}") == "5"
    assert boxed_answer(rf"\boxed{{5\{command}{{0}}}}") == rf"5\{command}{{0}}"


@pytest.mark.parametrize(
    "text",
    [
        "", "72", "boxed{72}", r"\boxedtext{72}", r"\boxed{5} \boxed{6 and \boxed{}", r"\boxed 72", r"\boxed{}",
        r"\boxed{  }", r"\boxed{72", r"\boxed{1\}", r"\boxed{5} \boxed{6",
    ],
)  # fmt: skip
def test_no_complete_last_box_is_no_answer(text: str):
    assert boxed_answer(text) is None


@pytest.mark.parametrize("piece", ["\\boxed{", "{", "\\boxed{}", "\\boxed{1} ", "\\phantom{", "\\boxed{1}a "])
def test_a_megabyte_of_openings_takes_linear_time(piece: str):
    text = "\\boxed{" + piece * (1_000_000 // len(piece))
    start = time.monotonic()
    boxed_answer(text)
    # Quadratic scanning would take minutes; a loaded machine gets its share.
    assert time.monotonic() - start < 10
