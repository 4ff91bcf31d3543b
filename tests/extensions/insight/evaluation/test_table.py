"""Evaluations of several models side by side."""

from async_rl.extensions.insight.evaluation.table import eval_table


def test_models_stand_below_each_other_and_figures_that_none_has_have_no_column():
    first = {
        "accuracy": 0.25, "accuracy_se": 0.031, "pass_at_1": 0.25, "pass_at_4": 0.5, "pass_at_k": 0.5, "samples": 4,
        "majority_at_n": 0.3, "length_mean": 7.25, "truncated": 0.125,
    }  # fmt: skip
    second = {
        "accuracy": 0.75, "accuracy_se": 0.03, "pass_at_1": 0.75, "pass_at_4": 0.9, "pass_at_k": 0.9, "samples": 4,
        "majority_at_n": 0.8, "length_mean": 123.0, "truncated": 0.0, "unanswered": 1,
    }  # fmt: skip
    assert eval_table({"a": first, "bc": second}) == [
        "model       accuracy  pass@4  maj@4  tokens    cut  unanswered",
        "a      0.250 ± 0.031   0.500  0.300     7.2  12.5%",
        "bc     0.750 ± 0.030   0.900  0.800   123.0   0.0%           1",
    ]


def test_pass_at_all_answers_has_its_number():
    six = {"accuracy": 0.5, "pass_at_4": 0.7, "pass_at_k": 0.8, "samples": 6}
    four = {"accuracy": 0.5, "pass_at_4": 0.7, "pass_at_k": 0.7, "samples": 4, "best_of_n": 0.75}
    assert eval_table({"a": six})[0].split() == ["model", "accuracy", "pass@4", "pass@6"]
    assert eval_table({"a": four})[0].split() == ["model", "accuracy", "pass@4", "best@4"]
