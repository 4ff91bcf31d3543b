"""Changes: only the last state of a record is written."""

from async_rl.queue.storage.journal import Changes


def test_a_record_is_written_as_it_is_at_the_drain_and_once():
    changes, record = Changes(), {"value": 0}
    changes.put("evaluation", "a", record)
    changes.put("evaluation", "a", record)
    record["value"] = 7
    assert [tuple(change) for change in changes.drain()] == [("evaluation", "a", {"value": 7})]
    assert changes.drain() == []


def test_a_record_that_was_written_is_crossed_out():
    changes = Changes()
    changes.put("lease", "a", {"value": 0})
    changes.drain()
    changes.delete("lease", "a")
    assert [tuple(change) for change in changes.drain()] == [("lease", "a", None)]


def test_a_record_that_may_have_been_written_before_is_crossed_out():
    changes = Changes()
    changes.put("group", "a", {"value": 0})
    changes.delete("group", "a")
    assert [tuple(change) for change in changes.drain()] == [("group", "a", None)]


def test_records_of_one_key_and_two_kinds_are_apart():
    changes = Changes()
    changes.put("lease", "a", {"value": 1})
    changes.put("closed_lease", "a", {"value": 2})
    changes.delete("lease", "a")
    assert [tuple(change) for change in changes.drain()] == [("lease", "a", None), ("closed_lease", "a", {"value": 2})]


def test_nothing_is_noted_where_nobody_writes():
    changes = Changes(is_wanted=False)
    changes.put("lease", "a", {"value": 0})
    changes.delete("lease", "b")
    assert changes.drain() == []
