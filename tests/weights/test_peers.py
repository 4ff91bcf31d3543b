"""From whom a generator pulls a version, worked by hand."""

from __future__ import annotations

import pytest

from async_rl.weights.scheduler import Member
from async_rl.weights.tcp.peers import PeerPull, PeerTree, distance


def joined(members: dict[bytes, Member], name: str, host: str, *, port: int = 7000) -> Member:
    member = Member(name.encode(), ("key", name), 0.0, False, host=host, peer_port=port)
    members[member.member_id] = member
    return member


def sources(tree: PeerTree, members: dict[bytes, Member], digest: str = "v1") -> dict[str, str | None]:
    """Assign every member in turn. Return the names of whom they pull from; None for one that must wait."""
    found: dict[str, str | None] = {}
    for member in list(members.values()):
        pull = tree.assign(member, digest)
        found[member.generator[1]] = None if pull is None else source_of(pull)
    return found


def source_of(pull: PeerPull | None) -> str:
    assert pull is not None, "it must wait"
    return "learner" if pull.source is None else pull.source.generator[1]


def a_tree(*names: str) -> tuple[PeerTree, dict[bytes, Member]]:
    """Members a, b, ... on machines of their own in one network."""
    members: dict[bytes, Member] = {}
    for number, name in enumerate(names, start=1):
        joined(members, name, f"10.0.0.{number}")
    tree = PeerTree(members)
    tree.publish("v1")
    return tree, members


def test_the_first_pulls_from_the_learner_and_each_serves_two_others():
    tree, members = a_tree(*"abcdefg")
    # The nearest to the learner first, then the one with fewer pulls: b and c on a, d and e on b and c, ...
    expected = {"a": "learner", "b": "a", "c": "a", "d": "b", "e": "c", "f": "b", "g": "c"}
    assert sources(tree, members) == expected


def test_a_generator_on_the_same_machine_is_asked_first_then_one_of_the_same_network():
    members: dict[bytes, Member] = {}
    for name, host in (("a", "10.0.0.1"), ("b", "10.0.1.1"), ("c", "10.0.1.2"), ("d", "10.0.1.2"), ("e", "10.0.0.7")):
        joined(members, name, host)
    tree = PeerTree(members)
    tree.publish("v1")
    # c asks b (its network), d asks c (its machine) though a is nearer to the learner, e asks a (its network).
    assert sources(tree, members) == {"a": "learner", "b": "a", "c": "b", "d": "c", "e": "a"}


def test_two_never_wait_for_each_other():
    tree, members = a_tree("a", "b", "c")
    assert sources(tree, members) == {"a": "learner", "b": "a", "c": "a"}
    # a is offered the version again. Both others wait for a's bytes, so it must not ask them.
    assert source_of(tree.assign(members[b"a"], "v1")) == "learner"


def test_a_blamed_generator_serves_nobody_for_some_versions_and_takes_no_place_at_the_learner():
    tree, members = a_tree("a", "b", "c", "d")
    pulls = [tree.assign(member, "v1") for member in members.values()]
    assert [source_of(pull) for pull in pulls] == ["learner", "a", "a", "b"]
    pull = pulls[1]
    assert pull is not None
    assert tree.leave_source(pull, is_faulty=True) is members[b"a"]
    assert tree.leave_source(pull, is_faulty=True) is None, "b pulls from the learner now"
    # b pulls from the learner now, d from b. Places left: b has one, c and d have two each, a has none.
    others = [joined(members, name, f"10.0.3.{i}", port=0) for i, name in enumerate("efghi")]
    assert [source_of(tree.assign(one, "v1")) for one in others] == ["b", "c", "c", "d", "d"]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("10.0.0.1", "10.0.0.1", 0),
        ("10.0.0.1", "10.0.0.200", 1),
        ("10.0.0.1", "10.0.1.1", 2),
        ("2001:db8::1", "2001:db8::2", 1),
        ("2001:db8::1", "10.0.0.1", 2),
        ("node-1", "node-2", 2),
    ],
)
def test_addresses_of_one_machine_are_nearer_than_those_of_one_network(one: str, other: str, expected: int):
    assert distance(one, other) == distance(other, one) == expected


def test_a_machine_serves_two_others_over_its_link_however_many_generators_it_has():
    members: dict[bytes, Member] = {}
    hosts = ("10.0.0.1", "10.0.0.1", "10.0.1.1", "10.0.2.1", "10.0.3.1", "10.0.4.1")
    for name, host in zip("abcdef", hosts, strict=True):
        joined(members, name, host)
    tree = PeerTree(members)
    tree.publish("v1")
    # a serves b beside it, and c; b serves d. Their machine's link is full then, so f asks c and not b.
    assert sources(tree, members) == {"a": "learner", "b": "a", "c": "a", "d": "b", "e": "c", "f": "c"}
