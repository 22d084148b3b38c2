"""Measured collectives become a network that plans use."""

from __future__ import annotations

import json

import pytest

from zerohvd.planning.network import OPS, Link, load
from zerohvd.tools.cli import main
from zerohvd.tools.doctor.bandwidth import SIZES, Point, cut, cycle_seconds, document, store


def points(links, ranks):
    return {
        op: [
            Point(m, ranks, links[op].seconds(m, ranks) * (2 if op == "allreduce" else 1))
            for m in SIZES
        ]
        for op in OPS
    }


LINKS = {op: Link(1e-5 * (i + 1), 1e9 / (i + 1)) for i, op in enumerate(OPS)}


def test_what_was_measured_is_what_a_plan_reads(tmp_path):
    found = document({"all": points(LINKS, 4)}, device="cuda:0", hosts=1)
    store(found, tmp_path / "new" / "network.json")
    net = load(tmp_path / "new" / "network.json")
    assert "4 ranks on 1 host" in net.name
    for op in OPS:
        assert net.link(op).alpha == pytest.approx(LINKS[op].alpha)
        assert net.link(op).beta == pytest.approx(LINKS[op].beta)
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "network.json"]


def test_on_cpus_a_reducescatter_costs_what_the_alltoall_costs_that_is_used_for_it():
    found = document({"all": points(LINKS, 2)}, device="cpu", hosts=1)
    assert found["links"]["reducescatter"] == found["links"]["alltoall"]
    assert found["parts"]["all"]["reducescatter"] != found["parts"]["all"]["alltoall"]


def test_within_and_across_hosts_are_stored_apart():
    measured = {where: points(LINKS, n) for where, n in (("all", 4), ("within", 2), ("across", 2))}
    found = json.loads(json.dumps(document(measured, device="cpu", hosts=2)))
    assert set(found["parts"]) == {"all", "within", "across"}
    assert "4 ranks on 2 hosts" in found["name"]


@pytest.mark.parametrize("hosts", ["aa", "a", "ab", "aab", "abab", "aabb"])
def test_ranks_are_cut_by_the_host_they_are_on(hosts):
    groups = cut(list(hosts))
    if hosts in ("aa", "a", "ab", "aab"):
        assert groups == []
        return
    within = [[r for r, h in enumerate(hosts) if h == host] for host in "ab"]
    assert [g for where, g in groups if where == "within"] == within
    across = [g for where, g in groups if where == "across"]
    assert sorted(r for g in across for r in g) == [0, 1, 2, 3]
    assert all({hosts[r] for r in g} == {"a", "b"} for g in across)


def test_horovods_cycle_is_the_one_that_is_set():
    assert cycle_seconds({}) == 1e-3
    assert cycle_seconds({"HOROVOD_CYCLE_TIME": "3.5"}) == 3.5e-3
    assert cycle_seconds({"HOROVOD_CYCLE_TIME": "often"}) == 1e-3


def test_bandwidth_needs_two_ranks(capsys):
    assert main(["doctor", "--bandwidth"]) == 2
    assert "--bandwidth needs at least two ranks: --run 2" in capsys.readouterr().err
