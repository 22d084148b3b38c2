"""Ranks that run different models or settings learn it, all of them, in the same words."""

from __future__ import annotations

import dataclasses

import pytest

from zerohvd.communication.agreement import (
    check_agreement,
    check_same_data,
    fail_together,
    out_of_step,
)
from zerohvd.errors import DisagreementError
from zerohvd.layout import ParamSpec, build_layout
from zerohvd.testing import ThreadWorld

SPECS = [
    ParamSpec("embed.weight", (10, 4)),
    ParamSpec("head.weight", (4, 10)),
    ParamSpec("head.bias", (10,)),
]
SETTINGS = {"stage": 2, "grad_clip": 1.0, "reduce_dtype": None}


def errors(size, odd_rank, specs=SPECS, settings=SETTINGS, **layout_settings):
    """What every rank says when `odd_rank` differs from the others."""

    def build(c):
        odd = c.rank == odd_rank
        layout = build_layout(specs if odd else SPECS, c.size, **(layout_settings if odd else {}))
        try:
            check_agreement(c, layout, settings if odd else SETTINGS, what="the optimizer")
        except DisagreementError as error:
            return str(error)
        return None

    return ThreadWorld(size).run(build)


def changed(index, **changes):
    specs = list(SPECS)
    specs[index] = dataclasses.replace(specs[index], **changes)
    return specs


ODD_MODELS = {
    "name": (
        changed(1, name="top.weight"),
        "parameter 1",
        "'head.weight' (4, 10) float32",
        "'top.weight' (4, 10) float32",
    ),
    "shape": (changed(1, shape=(10, 4)), "parameter 'head.weight'", "(4, 10)", "(10, 4)"),
    "dtype": (changed(2, dtype="float16"), "parameter 'head.bias'", "float32", "float16"),
    "group": (changed(2, group=1), "parameter 'head.bias'", "(10,) float32", "float32 in group 1"),
    "order": (SPECS[::-1], "parameter 0", "'embed.weight'", "'head.bias'"),
    "fewer": (SPECS[:2], "parameter 2", "'head.bias' (10,) float32", "only 2 parameters"),
    "more": (
        [*SPECS, ParamSpec("scale", ())],
        "parameter 3",
        "only 3 parameters",
        "'scale' () float32",
    ),
    "two": (
        [changed(0, shape=(1,))[0], changed(1, shape=(1,))[1], SPECS[2]],
        "parameter 'embed.weight'",
        "(10, 4)",
        "(1,)",
    ),
}


def assert_all_say(messages, where, reference, odd):
    assert len(set(messages)) == 1, messages
    message = messages[0]
    assert message.startswith(f"the optimizer: the ranks disagree, first at {where}: rank 0 has ")
    at_rank_0, elsewhere = message.split(": rank 0 has ")[1].split(", rank ", 1)
    assert reference in at_rank_0
    assert odd in elsewhere
    return message


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("case", ODD_MODELS)
def test_another_model_on_one_rank_is_an_error_on_all_that_names_the_parameter(case, size):
    specs, where, reference, odd = ODD_MODELS[case]
    message = assert_all_say(errors(size, size - 1, specs), where, reference, odd)
    assert f"rank {size - 1} has" in message
    assert f"ranks that differ from rank 0: [{size - 1}]" in message


@pytest.mark.parametrize("case", ODD_MODELS)
def test_where_rank_0_is_the_odd_one_the_others_are_listed(case):
    specs, where, as_others_have_it, as_rank_0_has_it = ODD_MODELS[case]
    messages = errors(4, 0, specs)
    assert_all_say(messages, where, as_rank_0_has_it, as_others_have_it)
    assert "ranks that differ from rank 0: [1, 2, 3]" in messages[0]


@pytest.mark.parametrize(
    ("settings", "where", "reference", "odd"),
    [
        ({**SETTINGS, "stage": 3}, "setting 'stage'", "2", "1 has 3"),
        ({**SETTINGS, "grad_clip": None}, "setting 'grad_clip'", "1.0", "has null"),
        ({**SETTINGS, "grad_clip": 1}, "setting 'grad_clip'", "1.0", "has 1 "),
        (
            {"stage": 2, "grad_clip": 1.0},
            "setting 'reduce_dtype'",
            "null",
            "has no such setting",
        ),
        ({**SETTINGS, "extra": "x"}, "setting 'extra'", "no such setting", 'has "x"'),
    ],
    ids=["value", "none", "type", "missing", "extra"],
)
def test_other_settings_on_one_rank_are_an_error_on_all_that_names_them(
    settings, where, reference, odd
):
    assert_all_say(errors(3, 1, settings=settings), where, reference, odd)


@pytest.mark.parametrize(
    ("setting", "reference", "odd"),
    [
        ({"bucket_bytes": 512}, "8388608", "512"),
        ({"chunk_bytes": 512}, "8388608", "512"),
        ({"partition": "parameter"}, '"flat"', '"parameter"'),
    ],
)
def test_another_layout_of_the_same_model_is_noticed_too(setting, reference, odd):
    where = f"setting 'layout.{next(iter(setting))}'"
    assert_all_say(errors(2, 1, **setting), where, reference, odd)


@pytest.mark.parametrize("size", range(1, 9))
def test_ranks_that_agree_go_on_after_one_small_exchange(size):
    def build(c):
        check_agreement(c, build_layout(SPECS, c.size), SETTINGS)
        return c.log.totals()

    for totals in ThreadWorld(size).run(build):
        assert set(totals) == {"allgather"}
        assert totals["allgather"] == (1, 32 * (size - 1))


def test_a_rank_alone_agrees_with_itself():
    assert errors(1, 0, SPECS[:1]) == [None]


def test_settings_may_hold_what_json_cannot_say():
    def build(c):
        check_agreement(c, build_layout(SPECS, c.size), {"op": complex(1, 2), "nan": float("nan")})

    assert ThreadWorld(2).run(build) == [None, None]


def test_ranks_that_share_nothing_still_get_the_error():
    specs = [ParamSpec(f"other.{i}", (i,)) for i in range(500)]
    messages = errors(3, 2, specs, settings={"stage": 0})
    assert_all_say(messages, "parameter 0", "'embed.weight'", "'other.0'")


def test_ranks_that_see_other_data_are_told_so():
    def check(c):
        check_same_data(c, "a", hint="sort it")
        with pytest.raises(ValueError, match=r"first batch of ranks \[2\].*such as sort it"):
            check_same_data(c, "b" if c.rank == 2 else "a", hint="sort it")
        return True

    assert all(ThreadWorld(4).run(check))


def test_what_fails_on_one_rank_fails_on_all():
    def build(c, failing):
        try:
            with fail_together(c, "see rank 1", name="built"):
                if c.rank == failing:
                    raise KeyError("mine")
        except (KeyError, DisagreementError) as error:
            return f"{type(error).__name__}: {error}"

    other = "DisagreementError: see rank 1"
    assert ThreadWorld(3).run(build, 1) == [other, "KeyError: 'mine'", other]
    assert ThreadWorld(3).run(build, None) == [None] * 3


READINGS = {
    "the same": ([[1, 2], [1, 2], [1, 2]], []),
    "nothing": ([[], [], []], []),
    "one is ahead": ([[1, 2], [1, 2, 3, 4], [1]], []),
    "one came late, and is behind": ([[1, 2, 3], [2, 3, 4], [1, 2]], []),
    "another order": ([[1, 2], [1, 5], [1, 2]], [1]),
    "rank 0 is the odd one": ([[9], [1, 2], [1, 2, 3]], [1, 2]),
    "one read from a cache": ([[1, 2], [], [1, 2]], []),
}


@pytest.mark.parametrize("case", READINGS)
def test_ranks_that_read_something_else_are_found(case):
    seen, odd = READINGS[case]
    found = ThreadWorld(3).run(lambda c: out_of_step(c, seen[c.rank], name="order"))
    assert found == [odd] * 3
