"""The doctor says how old data may be, and how old it will be."""

from typing import Any

import pytest

from async_rl.config.loading import parse_config
from async_rl.launch.checks.settings import find_age


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ["at most 4 versions", "2 + 1.4 L / S"]),
        ({"queue": {"run_ahead": 3}}, ["at most 4 versions", "about 4 (queue.run_ahead)"]),
        ({"queue": {"run_ahead": "bound", "max_staleness": 16}}, ["at most 16 versions", "nearly that old"]),
        ({"queue": {"on_stale": "wait"}}, ["nearly that old"]),  # sampling is not paced there
        ({"queue": {"max_staleness": 0}}, ["every token 0 versions old"]),
        ({"queue": {"max_staleness": 2}, "learner": {"fixed_lag": 2}}, ["every token 2 versions old"]),
        # Four versions a batch: with 7 = 2 x 4 - 1 the next batch may begin with the last one's first version.
        ({"queue": {"max_staleness": 6}, "learner": {"epochs_per_batch": 4}}, ["= 6: generators wait while"]),
        ({"queue": {"max_staleness": 7}, "learner": {"updates_per_batch": 4}}, ["at most 7 versions"]),
    ],
)
def test_the_age_of_data_follows_from_bound_and_pace(settings: dict[str, Any], words: list[str]):
    config = parse_config({"run": {"dir": "r"}, "model": {"path": "m"}, **settings}, "test")
    found = find_age(config)
    assert (found.state, found.fix[:11]) == (("WARN", "set it to 7") if "wait while" in found.found else ("OK", ""))
    assert [word for word in words if word not in found.found] == []
