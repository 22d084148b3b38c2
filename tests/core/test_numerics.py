"""Numbers that every rank computes alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerohvd.numerics import (
    check_norm_type,
    clip_factor,
    divide_factors,
    finish_norm,
    master_dtype,
)

shards_of_floats = st.lists(
    st.lists(st.floats(-1e3, 1e3), max_size=20), min_size=1, max_size=8
).map(lambda shards: [np.array(s) for s in shards])


@given(st.integers(1, 1024), st.floats(0.01, 100))
def test_dividing_before_and_after_the_sum_is_dividing_by_the_number_of_ranks(size, predivide):
    factors = divide_factors(True, size, predivide)
    assert factors.before * factors.after == pytest.approx(1 / size)


def test_without_a_predivide_factor_the_whole_division_comes_after_the_sum():
    assert divide_factors(True, 4).before == 1.0
    assert divide_factors(True, 4).after == 0.25


def test_a_sum_is_not_scaled():
    factors = divide_factors(False, 4)
    assert (factors.before, factors.after) == (1.0, 1.0)
    with pytest.raises(ValueError, match="needs op=Average, not op=Sum"):
        divide_factors(False, 4, predivide=2.0)


@pytest.mark.parametrize("predivide", [0.0, -1.0, math.nan])
def test_a_predivide_factor_is_greater_than_zero(predivide):
    with pytest.raises(ValueError, match="must be greater than 0"):
        divide_factors(True, 4, predivide)


@given(shards_of_floats, st.sampled_from([1.0, 2.0, 3.0, math.inf]))
def test_the_norm_of_all_shards_is_that_of_the_whole(shards, p):
    if math.isinf(p):
        total = max(np.abs(s).max(initial=0.0) for s in shards)
    else:
        total = sum((np.abs(s) ** p).sum() for s in shards)
    whole = np.concatenate(shards)
    expected = np.linalg.norm(whole, p) if whole.size else 0.0
    assert finish_norm(float(total), p) == pytest.approx(expected)


@pytest.mark.parametrize("total", [math.inf, math.nan])
@pytest.mark.parametrize("p", [2.0, math.inf])
def test_a_norm_that_is_not_finite_stays_that_way(total, p):
    assert not math.isfinite(finish_norm(total, p))


@given(shards_of_floats, st.floats(1e-3, 1e3))
def test_clipping_brings_the_norm_to_at_most_the_maximum_and_never_raises_it(shards, max_norm):
    whole = np.concatenate(shards)
    norm = float(np.linalg.norm(whole))
    factor = clip_factor(norm, max_norm)
    assert factor <= 1.0
    assert np.linalg.norm(whole * factor) <= max_norm * (1 + 1e-9)
    if norm <= max_norm - 1e-6:
        assert factor == 1.0


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_gradients_that_are_not_finite_are_not_scaled(norm):
    assert clip_factor(norm, 1.0) == 1.0


@pytest.mark.parametrize("norm_type", [1, 2, 2.5, math.inf])
def test_norm_types_that_exist(norm_type):
    assert check_norm_type(norm_type) == float(norm_type)


@pytest.mark.parametrize("norm_type", [0, -1, -math.inf, math.nan])
def test_norm_types_that_do_not(norm_type):
    with pytest.raises(ValueError, match="norm_type must be greater than 0, or inf"):
        check_norm_type(norm_type)


@pytest.mark.parametrize(
    ("param", "configured", "expected"),
    [
        ("float16", None, "float32"),
        ("bfloat16", None, "float32"),
        ("float8_e5m2", None, "float32"),
        ("float32", None, "float32"),
        ("float64", None, "float64"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float32", "float64", "float64"),
    ],
)
def test_the_master_dtype(param, configured, expected):
    assert master_dtype(param, configured) == expected
