"""The ready groups: order of delivery, age, and totals."""

from async_rl.queue.core.groups import ReadyGroups, StoredGroup
from async_rl.queue.storage.payloads import PayloadRef


def held(lease_id: str, position: int, *, named: int = 0, bound: int = 0, length: int = 10) -> StoredGroup:
    place = PayloadRef(position, length, 0)
    return StoredGroup(lease_id, "g0", position, named, bound, bound, bound, 2, 6, 1.0, 1.0, 0.0, 0, False, place)


def ids(groups) -> list[str]:
    return [group.lease_id for group in groups]


def test_groups_leave_by_named_version_then_position_whatever_their_arrival():
    ready = ReadyGroups([held("c", 9, named=0), held("d", 1, named=1), held("b", 5, named=0), held("a", 2, named=0)])
    assert ids(ready.pop_first(3)) == ["a", "b", "c"]
    assert ids(ready.pop_all()) == ["d"]


def test_only_what_is_older_than_asked_leaves_by_age():
    ready = ReadyGroups([held("a", 0, bound=3), held("b", 1, bound=1), held("c", 2, bound=2)])
    assert sorted(ids(ready.pop_older_than(3))) == ["b", "c"]
    assert ready.pop_older_than(3) == []
    assert ids(ready) == ["a"]


def test_a_group_that_left_one_way_is_not_found_the_other_way():
    ready = ReadyGroups([held("a", 0, bound=0), held("b", 1, bound=5), held("c", 2, bound=0)])
    assert ids(ready.pop_first(1)) == ["a"]
    assert ids(ready.pop_older_than(1)) == ["c"]
    assert ids(ready.pop_first(1)) == ["b"]
    assert len(ready) == 0


def test_a_group_that_comes_back_leaves_once():
    ready = ReadyGroups([held("a", 0), held("b", 1)])
    (first,) = ready.pop_first(1)
    ready.add(first)
    assert ids(ready.pop_older_than(1)) == ["a", "b"]
    assert ready.pop_all() == []


def test_bytes_and_tokens_are_those_of_what_is_there():
    ready = ReadyGroups([held("a", 0, length=10), held("b", 1, length=4097)])
    assert (ready.num_bytes, ready.num_tokens) == (3 * 4096, 12)
    ready.remove("a")
    assert (ready.num_bytes, ready.num_tokens) == (2 * 4096, 6)
    assert "a" not in ready
    ready.pop_older_than(1)
    assert (ready.num_bytes, ready.num_tokens) == (0, 0)
