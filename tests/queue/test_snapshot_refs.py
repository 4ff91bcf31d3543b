"""SnapshotRefs: what a snapshot needs stays until nothing pins it."""

from async_rl.queue.core.groups import SnapshotRecord, SnapshotRefs, snapshot_key
from async_rl.queue.storage.journal import Changes
from tests.queue.test_ready_groups import held, ids


def make_pins() -> SnapshotRefs:
    return SnapshotRefs(Changes(is_wanted=False))


def test_a_group_is_given_back_when_its_last_pin_goes():
    pins, (a, b, c) = make_pins(), (held(name, i) for i, name in enumerate("abc"))
    assert pins.add("line/1", [a, b]) == []
    assert pins.add("line/2", [b, c]) == []
    assert ids(pins.release_all_but("line/2")) == ["a"]
    assert "b" in pins
    assert pins.get("a") is None
    assert ids(pins.release_all_but(None)) == ["b", "c"]
    assert pins.groups == []


def test_a_snapshot_made_again_replaces_the_one_of_its_name():
    pins, (a, b) = make_pins(), (held(name, i) for i, name in enumerate("ab"))
    pins.add("line/1", [a, b])
    assert ids(pins.add("line/1", [b])) == ["a"]
    assert [(key, pin.lease_ids) for key, pin in pins] == [("line/1", ("b",))]


def test_a_group_pinned_twice_is_listed_once():
    pins, a = make_pins(), held("a", 0)
    pins.add("line/1", [a])
    pins.add("line/2", [a])
    assert ids(pins.groups) == ["a"]


def test_pins_are_written_down_and_crossed_out():
    changes = Changes()
    pins = SnapshotRefs(changes)
    pins.add(snapshot_key("line", 1), [held("a", 0)])
    assert [tuple(change) for change in changes.drain()] == [("snapshot", "line/1", SnapshotRecord(("a",)))]
    pins.release_all_but("line/2")
    assert [tuple(change) for change in changes.drain()] == [("snapshot", "line/1", None)]
