"""Doing the recorded operations behind a memory gives what doing all of them gives."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zerohvd.stage3.history import History, Operation

MEMORIES = range(4)


@st.composite
def operations(draw):
    """(target, sources, whether the target's old content is lost, a number)."""
    target = draw(st.sampled_from(MEMORIES))
    sources = draw(st.lists(st.sampled_from(MEMORIES), max_size=2))
    replaces = draw(st.booleans()) and target not in sources
    return target, sources, replaces, draw(st.integers(0, 1000))


def do(calls):
    content = dict.fromkeys(MEMORIES, ())
    for target, sources, replaces, number in calls:
        old = () if replaces else content[target]
        content[target] = hash((old, *(content[s] for s in sources), number))
    return content


def record(calls):
    history = History()
    for call in calls:
        target, sources, replaces, _ = call
        kept = frozenset() if replaces else frozenset({target})
        written = frozenset({target})
        history.add(Operation(call, frozenset(sources) | kept, written, written - kept))
    return history


@settings(max_examples=300, deadline=None)
@given(st.lists(operations(), max_size=12), st.sampled_from(MEMORIES))
def test_what_is_behind_a_memory_makes_its_content(calls, memory):
    found = record(calls).behind(memory)
    assert do(found)[memory] == do(calls)[memory]
    assert len(found) <= len(calls)


def test_what_has_no_part_in_it_is_left_out():
    fill, other, overwritten = (0, [], True, 1), (1, [], True, 2), (0, [], True, 3)
    assert record([overwritten, other, fill]).behind(0) == [fill]
    assert record([]).behind(0) == []


def test_one_call_can_write_several_memories():
    history = History()
    history.add(Operation("a", frozenset(), frozenset({0}), frozenset({0})))
    history.add(Operation("b", frozenset({0}), frozenset({0, 1}), frozenset({1})))
    assert history.behind(1) == history.behind(0) == ["a", "b"]
