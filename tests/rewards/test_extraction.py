"""Where answers are found, and which formats count."""

import time

import pytest

from async_rl.rewards.extraction import Extraction, extract_answer_tag

NOTHING = Extraction(None, False)


@pytest.mark.parametrize(
    "text", ["<think>a</think><answer>7</answer>", "Sure.\n<think>\na\n</think>\n\n<answer>\n 7 \n</answer>"]
)
def test_four_tags_once_in_order_and_at_the_end_are_valid(text: str):
    assert extract_answer_tag(text) == Extraction("7", True)


@pytest.mark.parametrize(
    "text",
    [
        "<answer>7</answer>",
        "<think>a<answer>7</answer>",
        "<think>a</think><answer>7</answer>\n",
        "<answer>7</answer><think>a</think>",
        "<answer><think>a</think>7</answer> <answer>7</answer>",
        "<think>a</think><think>b</think><answer>7</answer>",
        "<think>a</think><answer>6</answer><answer>7</answer>",
        "</think>a<think><answer>7</answer>",
        "<answer>7</answer><answer>8",  # the last closed answer counts
    ],
)
def test_a_wrong_structure_keeps_the_answer_but_not_the_format(text: str):
    assert extract_answer_tag(text) == Extraction("7", False)


@pytest.mark.parametrize(
    "text", ["", "7", "<answer>7", "7</answer>", "</answer>7<answer>", "<think>a</think><answer> </answer>"]
)
def test_no_closed_answer_tag_is_no_answer(text: str):
    assert extract_answer_tag(text) == NOTHING


@pytest.mark.parametrize("piece", ["<answer>", "</answer>", "<answer></answer>"])
def test_a_megabyte_of_openings_takes_linear_time(piece: str):
    text = piece * (1_000_000 // len(piece))
    start = time.monotonic()
    extract_answer_tag(text)
    # Quadratic scanning would take minutes; a loaded machine gets its share.
    assert time.monotonic() - start < 10
