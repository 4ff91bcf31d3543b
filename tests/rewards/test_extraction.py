"""Where answers are found, and which formats count."""

import time

import pytest

from async_rl.rewards.extraction import Extraction, extract_answer_tag, extract_boxed

NOTHING = Extraction(None, False)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{72}.", "72"),
        (r"\boxed{1} no, \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{a \\}", "a \\\\"),
        (r"\boxed{\boxed{5}}", "5"),
        ("\\boxed{4\n}", "4"),
        (r"\boxed{5} and a stray }", "5"),
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
    assert extract_boxed(text) == Extraction(answer, True)


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
        (r"\boxed3\boxed5", "3, 5"),
        (r"first \boxed{1}, then $\boxed{3}$ and $\boxed{5}$", "3, 5"),
        (r"\boxed{1} gives \boxed{2}", "2"),
        (r"\boxed{x = \boxed{2}}", "2"),
    ],
)
def test_boxes_with_only_signs_and_and_or_or_between_them_are_one_list(text: str, answer: str):
    assert extract_boxed(text) == Extraction(answer, True)


@pytest.mark.parametrize("command", ["phantom", "hphantom", "vphantom", "cancel", "xcancel", "sout"])
def test_a_box_that_is_not_printed_or_struck_out_is_no_answer(command: str):
    hidden = rf"\{command}{{so $\boxed{{\frac{{1}}{{2}}}}$}}"
    assert extract_boxed(hidden) == NOTHING
    assert extract_boxed(rf"\boxed{{5}} {hidden}") == Extraction("5", True)
    assert extract_boxed(rf"\boxed{{5\{command}{{0}}}}") == Extraction(rf"5\{command}{{0}}", True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "72",
        "boxed{72}",
        r"\boxedtext{72}",
        r"\boxed{5} \boxed{6 and \boxed{}",
        r"\boxed 72",
        r"\boxed{}",
        r"\boxed{  }",
        r"\boxed{72",
        r"\boxed{1\}",
        r"\boxed{5} \boxed{6",
    ],
)
def test_no_complete_last_box_is_no_answer(text: str):
    assert extract_boxed(text) == NOTHING


@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think><answer>7</answer>",
        "Sure.\n<think>\na\n</think>\n\n<answer>\n 7 \n</answer>",
    ],
)
def test_four_tags_once_in_order_and_at_the_end_are_valid(text: str):
    assert extract_answer_tag(text) == Extraction("7", True)


@pytest.mark.parametrize(
    "text",
    [
        "<answer>7</answer>",
        "<think>a<answer>7</answer>",
        "<think>a</think><answer>7</answer>\n",
        "<think>a</think><answer>7</answer>.",
        "<answer>7</answer><think>a</think>",
        "<answer><think>a</think>7</answer> <answer>7</answer>",
        "<think>a</think><think>b</think><answer>7</answer>",
        "<think>a</think></think><answer>7</answer>",
        "<think>a</think><answer>6</answer><answer>7</answer>",
        "</think>a<think><answer>7</answer>",
    ],
)
def test_a_wrong_structure_keeps_the_answer_but_not_the_format(text: str):
    assert extract_answer_tag(text) == Extraction("7", False)


@pytest.mark.parametrize(
    "text", ["", "7", "<answer>7", "7</answer>", "</answer>7<answer>", "<think>a</think><answer> </answer>"]
)
def test_no_closed_answer_tag_is_no_answer(text: str):
    assert extract_answer_tag(text) == NOTHING


def test_the_last_closed_answer_counts_even_before_an_open_one():
    assert extract_answer_tag("<answer>7</answer><answer>8") == Extraction("7", False)


def test_an_inner_open_tag_belongs_to_the_answer():
    assert extract_answer_tag("<answer>a<answer>b</answer>") == Extraction("a<answer>b", False)


@pytest.mark.parametrize(
    "piece",
    [
        "<answer>",
        "</answer>",
        "\\boxed{",
        "{",
        "<answer></answer>",
        "\\boxed{}",
        "\\boxed{1} ",
        "\\phantom{",
        "\\boxed{1}a ",
    ],
)
def test_a_megabyte_of_openings_takes_linear_time(piece: str):
    text = "\\boxed{" + piece * (1_000_000 // len(piece))
    start = time.monotonic()
    extract_boxed(text)
    extract_answer_tag(text)
    # Quadratic scanning would take minutes; a loaded machine gets its share.
    assert time.monotonic() - start < 10
