"""Commits in the memory of hosts: what is lost with a host comes from another, or it is said."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_checkpoint_session import NUMEL, NumpyTraining

from zerohvd.checkpoint import CheckpointError
from zerohvd.communication.rendezvous import Call
from zerohvd.elastic import shipping
from zerohvd.elastic.copies import Copies, LostStateError
from zerohvd.elastic.generations import newest_complete
from zerohvd.elastic.store import Store
from zerohvd.testing import ThreadWorld

worlds = st.lists(st.sampled_from("abcd"), min_size=1, max_size=5)


def commits(job, hosts, fills, fails=None):
    """Ranks on `hosts` commit once per fill; at `fails`, (commit, rank), one of them cannot."""

    def live(ranks):
        training = NumpyTraining(ranks)
        copies = Copies(job, hosts[ranks.rank], keep=lambda folder: None)
        copies.restore(training, ranks)
        for number, fill in enumerate(fills):
            training.__init__(ranks, fill)
            if (number, ranks.rank) == fails:
                training.pieces = lambda: 1 / 0
            copies.commit(training, {"fill": fill})
        return copies.sent

    return ThreadWorld(len(hosts)).run(live)


def restored(job, hosts):
    """What ranks on `hosts` find: (extra, w, mean, grad) of each."""

    def live(ranks):
        training = NumpyTraining(ranks, fill=-1)
        copies = Copies(job, hosts[ranks.rank], keep=lambda folder: None)
        found = copies.restore(training, training.meet(Call.RESTORE))
        return found, training.shard, training.mean, training.grad

    return ThreadWorld(len(hosts)).run(live)


def assert_filled(found, fill, saved):
    """All of it is that of a commit by `saved` ranks."""
    assert [f[0][0] for f in found] == [{"fill": fill}] * len(found)
    whole = np.concatenate([f[1] for f in found])
    np.testing.assert_array_equal(whole, np.arange(NUMEL, dtype=np.float32) + np.float32(fill))
    for rank, (_, _, mean, grad) in enumerate(found):
        own = rank % 2 if len(found) == saved else 0
        np.testing.assert_array_equal(mean, np.full(2, fill + own, np.float32))
        sums = sum(fill + r for r in range(rank, saved, len(found)))
        np.testing.assert_allclose(grad, sums * len(found) / saved, rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(hosts=worlds, now=worlds, data=st.data())
def test_any_hosts_are_lost_and_any_ranks_go_on(hosts, now, data):
    lost = data.draw(st.sets(st.sampled_from(sorted(set(hosts)))))
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder)
        commits(job, hosts, [10, 20])
        for host in lost:
            shutil.rmtree(job / host)
        # Hosts that are alive, but where no rank runs now, hold what nobody reaches.
        held = {h: Store(job / h).held() for h in set(now)}
        expected = newest_complete(held)
        if expected is None and any(held.values()):
            with pytest.raises(LostStateError, match="no commit is whole"):
                restored(job, now)
            return
        found = restored(job, now)
        if expected is None:
            assert all(f[0] is None and f[1].min(initial=0) >= -1 for f in found)
        else:
            assert_filled(found, 20, len(hosts))
            left = [name.name for h in set(now) for name in (job / h).iterdir()]
            assert not [n for n in left if n.endswith(".body") and n[:-5] + ".json" not in left]


def test_one_host_of_several_may_be_lost_at_any_time(tmp_path):
    for number, gone in enumerate("abc"):
        job = tmp_path / gone
        hosts = ["a", "a", "b", "b", "c"]
        commits(job, hosts, [10, 20])
        shutil.rmtree(job / gone)
        now = [h for h in hosts if h != gone]
        assert_filled(restored(job, now), 20, 5)
        # It goes on, and commits again with fewer ranks, on the hosts that are left.
        commits(job, now, [30 + number])
        assert_filled(restored(job, now), 30 + number, len(now))


def test_a_commit_that_fails_leaves_the_one_before(tmp_path):
    with pytest.raises(CheckpointError, match="rank 1: ZeroDivisionError"):
        commits(tmp_path, ["a", "b", "b"], [10, 20], fails=(1, 1))
    assert {s.number for h in "ab" for s in Store(tmp_path / h).held()} == {1}
    assert_filled(restored(tmp_path, ["a", "b", "b"]), 10, 3)


def test_a_commit_that_is_cut_off_leaves_the_one_before(tmp_path):
    """As by SIGKILL: some ranks have written the next commit, to its end or half, others not."""
    hosts = ["a", "a", "b"]
    commits(tmp_path, hosts, [10])
    old = {p: p.read_bytes() for p in tmp_path.glob("*/1-*")}
    commits(tmp_path, hosts, [20])
    for path, data in old.items():
        path.write_bytes(data)
    for path in [*tmp_path.glob("*/2-*-1-of-3.json"), *tmp_path.glob("a/2-*-0-of-3.body")]:
        path.unlink()
    assert_filled(restored(tmp_path, hosts), 10, 3)
    # What was left of the other is gone, and the next commit is the newest again.
    assert not list(tmp_path.glob("*/2-*"))
    commits(tmp_path, hosts, [30])
    assert_filled(restored(tmp_path, ["a", "b"]), 30, 3)


def test_memory_holds_one_commit_between_commits(tmp_path):
    hosts = ["a", "b", "a", "b"]
    sent = commits(tmp_path, hosts, [10, 20, 30])
    for host in "ab":
        bodies = list((tmp_path / host).glob("*.body"))
        assert len(bodies) == 4  # of two ranks, and of their partners
    shards = [4 * NUMEL * (r + 1) // 4 - 4 * NUMEL * r // 4 for r in range(4)]
    assert all(s > n for s, n in zip(sent, shards, strict=True))
    assert commits(tmp_path / "alone", ["a", "a"], [10]) == [0, 0]  # no other host: nothing moves


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_files_of_any_size_arrive(tmp_path, block, monkeypatch):
    monkeypatch.setattr(shipping, "_BLOCK", block)
    sizes = [0, 1, 13, 14, 40]
    plan = [(0, 2), (1, 2), (2, 0), (0, 1), (0, 2)]
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}").write_bytes(bytes(range(size)))
    parcels = [
        shipping.Parcel(s, t, tmp_path / f"{n}", tmp_path / f"{n}.there")
        for n, (s, t) in enumerate(plan)
    ]
    sent = ThreadWorld(3).run(lambda ranks: shipping.ship(ranks, parcels, "x"))
    assert sent == [0 + 14 + 40, 1, 13]
    for number, size in enumerate(sizes):
        assert (tmp_path / f"{number}.there").read_bytes() == bytes(range(size))


def test_no_space_on_one_host_is_said_on_all(tmp_path):
    (tmp_path / "x").write_bytes(b"1234")
    parcels = [shipping.Parcel(0, 1, tmp_path / "x", tmp_path / "no" / "such" / "folder")]
    errors = []

    def live(ranks):
        with pytest.raises(CheckpointError, match=r"rank 1.*No such file") as caught:
            shipping.ship(ranks, parcels, "x")
        errors.append(str(caught.value))

    ThreadWorld(2).run(live)
    assert len(errors) == 2
