"""Python values go into JSON and come back, and nothing else does."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerohvd.checkpoint.values.tree import decode, encode

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(),
    st.complex_numbers(allow_nan=False),
)  # fmt: skip
keys = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.lists(inner).map(deque),
        st.sets(st.integers()),
    ),
    max_leaves=20,
)


def there_and_back(value):
    arrays: dict = {}
    text = json.dumps(encode(value, "v", arrays), allow_nan=False)
    return decode(json.loads(text), lambda key, of: arrays[key].data)


@given(values)
def test_values_come_back_with_their_types(value):
    back = there_and_back(value)
    assert back == value and type(back) is type(value)


def test_arrays_are_kept_beside_the_json():
    value = {"a": [np.arange(3), {"b": np.ones((2, 2), np.float16)}], "s": np.float32(1.5)}
    back = there_and_back(value)
    np.testing.assert_array_equal(back["a"][0], np.arange(3))
    np.testing.assert_array_equal(back["a"][1]["b"], np.ones((2, 2)))
    assert back["s"] == np.float32(1.5) and back["s"].dtype == np.float32


def test_special_values():
    assert there_and_back(float("-inf")) == float("-inf")
    assert np.isnan(there_and_back(float("nan")))
    assert there_and_back(Counter({3: 2})) == Counter({3: 2})
    assert isinstance(there_and_back(Counter("ab")), Counter)
    assert there_and_back(OrderedDict(a=1)) == {"a": 1}
    assert there_and_back({"!tuple": [1]}) == {"!tuple": [1]}


@pytest.mark.parametrize("value", [object(), print, {"a": [open]}, np.array(["text"])])
def test_anything_else_is_refused_with_its_place(value):
    with pytest.raises(TypeError, match="cannot be stored"):
        encode(value, "extra", {})


def test_a_tag_of_the_future_is_refused():
    with pytest.raises(ValueError, match="!code"):
        decode({"!code": "import os"}, lambda key, of: None)


def test_a_value_that_contains_itself_is_refused():
    value: list = []
    value.append({"again": value})
    with pytest.raises(ValueError, match=r"in state\.extra .*contains itself"):
        encode(value, "state.extra", {})


def test_an_array_of_words_is_refused_with_its_place():
    with pytest.raises(TypeError, match=r"state\.extra\.names is an array of <U3"):
        encode({"names": np.array(["one"])}, "state.extra", {})
