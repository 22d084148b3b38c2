"""Whatever ranks and hosts are lost: the newest commit that is whole is found, or none is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerohvd.elastic.generations import (
    Generation,
    Held,
    Shipment,
    lost_shards,
    newest_complete,
    partners,
    shipments,
)

# The host of each rank: one to five hosts, with other numbers of ranks on each.
worlds = st.lists(st.sampled_from("abcde"), min_size=1, max_size=9)


def commit(held, hosts, number, written, copied=(), purge=False):
    """What hosts hold after ranks have committed: who has written, and whose copy has arrived."""
    whole = set(written) == set(range(len(hosts)))
    for rank, (host, partner) in enumerate(zip(hosts, partners(hosts), strict=True)):
        shard = Held(number, f"id{number}", len(hosts), rank)
        if rank in written:
            held[host].add(shard)
        if partner is not None and rank in copied:
            held[hosts[partner]].add(shard)
    if purge and whole:
        for host in held:
            held[host] = {s for s in held[host] if s.number == number}


@given(hosts=worlds, data=st.data())
def test_any_loss_in_any_moment_of_a_commit(hosts, data):
    """After two commits, a third is under way; then hosts are lost. An oracle looks by itself."""
    ranks = range(len(hosts))
    held = {host: set() for host in hosts}
    commit(held, hosts, 1, ranks, ranks)
    commit(held, hosts, 2, ranks, ranks, purge=True)
    written = data.draw(st.sets(st.sampled_from(ranks)))
    copied = data.draw(st.sets(st.sampled_from(sorted(written)))) if written else set()
    commit(held, hosts, 3, written, copied)
    lost = data.draw(st.sets(st.sampled_from(sorted(held))))
    left = {host: shards for host, shards in held.items() if host not in lost}

    found = newest_complete(left)

    def whole(number):
        return all(
            any(Held(number, f"id{number}", len(hosts), r) in s for s in left.values())
            for r in ranks
        )

    expected = next((n for n in (3, 2, 1) if whole(n)), None)
    assert (found.number if found else None) == expected
    if found:
        assert found.size == len(hosts)
        for rank, places in enumerate(found.places):
            assert places and all(
                Held(found.number, found.id, found.size, rank) in left[p] for p in places
            )
    if not lost:
        assert found and found.number >= 2  # an interrupted commit takes nothing away
    if len(lost) == 1 and len(set(hosts)) > 1:
        assert found and found.number >= 2  # no single host takes a shard and its copy


@given(worlds)
def test_a_copy_lies_on_another_host_where_there_is_one(hosts):
    found = partners(hosts)
    assert len(found) == len(hosts)
    for rank, partner in enumerate(found):
        assert (partner is None) == (len(set(hosts)) == 1)
        assert partner is None or hosts[partner] != hosts[rank]


@pytest.mark.parametrize("count", [2, 4, 6])
def test_hosts_keep_copies_in_pairs_so_that_few_double_losses_lose_a_shard(count):
    hosts = [h for h in "abcdef"[:count] for _ in range(2)]
    held = {host: set() for host in hosts}
    commit(held, hosts, 1, range(len(hosts)), range(len(hosts)))
    fatal = [
        pair
        for pair in itertools.combinations(sorted(held), 2)
        if newest_complete({h: s for h, s in held.items() if h not in pair}) is None
    ]
    assert len(fatal) == count // 2


def test_shards_of_different_commits_do_not_make_a_whole():
    """A commit was interrupted, the job went on from the one before, and was interrupted again."""
    held = {"a": {Held(4, "first", 2, 0), Held(4, "second", 2, 1)}, "b": {Held(3, "old", 3, 0)}}
    assert newest_complete(held) is None
    assert lost_shards(held) == (4, [0])
    held["b"].add(Held(4, "first", 2, 1))
    assert newest_complete(held) == Generation(4, "first", 2, (("a",), ("b",)))


def test_nothing_held_is_nothing_complete():
    assert newest_complete({"a": [], "b": []}) is None


@given(hosts=worlds, now=worlds, data=st.data())
def test_every_rank_finds_what_it_needs_on_its_host(hosts, now, data):
    """Commit on one set of hosts, going on with another one; hosts that are new hold nothing."""
    held = {host: set() for host in {*hosts, *now}}
    commit(held, hosts, 1, range(len(hosts)), range(len(hosts)))
    left = {host: shards for host, shards in held.items() if host in now}
    found = newest_complete(left)
    if found is None:
        return
    needed = [data.draw(st.sets(st.sampled_from(range(len(hosts))))) for _ in now]
    plan = shipments(found, now, needed)
    there = {host: {s.rank for s in shards} for host, shards in left.items()}
    for shard, source, target in plan:
        assert shard in there[now[source]] and now[source] != now[target]
    received = [(now[s.target], s.shard) for s in plan]
    assert len(received) == len(set(received))  # once per host
    for host, shard in received:
        assert shard not in there[host]
        there[host].add(shard)
    for rank, shards in enumerate(needed):
        assert shards <= there[now[rank]]


def test_those_who_hold_the_same_take_turns_in_sending():
    found = Generation(1, "x", 2, (("a",), ("a",)))
    plan = shipments(found, ["a", "a", "b"], [(), (), (0, 1)])
    assert plan == [Shipment(0, 0, 2), Shipment(1, 1, 2)]


def test_a_shard_where_no_rank_runs_is_said():
    found = Generation(1, "x", 1, (("gone",),))
    with pytest.raises(ValueError, match="rank 0 is on gone, where no rank runs"):
        shipments(found, ["a"], [(0,)])
