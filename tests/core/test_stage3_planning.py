"""Which parameters are gathered together, over trees that stand for any framework's models."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerohvd.errors import DisagreementError
from zerohvd.layout import ParamSpec
from zerohvd.stage3.planning import ROOT, Node, PlannedParam, UnitOptions, plan_units
from zerohvd.testing import ThreadWorld


class Layer:
    """A module: children by name, and the parameters of its own."""

    def __init__(self, params=(), **children):
        self.params = {f"w{i}": p for i, p in enumerate(params)}
        self.children = children


class Block(Layer):
    pass


class Head(Layer):
    pass


class Items(Layer):
    """A list of layers."""

    def __init__(self, *items):
        super().__init__(**{str(i): item for i, item in enumerate(items)})


class Wrapper(Layer):
    """Runs the layer inside it; only the wrapper is entered."""

    def __init__(self, inner):
        super().__init__(inner=inner)


class Param:
    def __init__(self, numel=1000):
        self.numel = numel


def node(layer, name="", inside=False):
    path = f"{name}." if name else ""
    wraps = isinstance(layer, Wrapper)
    return Node(
        name,
        layer,
        type(layer.children["inner"] if wraps else layer),
        tuple(node(c, f"{path}{k}", wraps) for k, c in layer.children.items()),
        tuple(
            PlannedParam(ParamSpec(f"{path}{k}", (p.numel,)), p) for k, p in layer.params.items()
        ),
        is_container=isinstance(layer, Items),
        can_be_unit=not inside,
    )


def plan(layer, units=None, **options):
    return plan_units(node(layer), UnitOptions(units=units, **options), base=Layer)


def names(found):
    return {u.name: [p.spec.name for p in u.params] for u in found.units}


def gpt(layers=2):
    blocks = [Block([Param()], up=Layer([Param()])) for _ in range(layers)]
    return Layer(embed=Layer([Param()]), h=Items(*blocks), head=Head([Param()]))


EXPECTED = {
    ROOT: ["embed.w0", "head.w0"],
    "h.0": ["h.0.w0", "h.0.up.w0"],
    "h.1": ["h.1.w0", "h.1.up.w0"],
}


def test_repeated_blocks_are_units():
    assert names(plan(gpt())) == EXPECTED


@pytest.mark.parametrize("how", ["class", "classes", "predicate", "list", "set"])
def test_units_can_be_said(how):
    model = gpt()
    blocks = list(model.children["h"].children.values())
    units = {
        "class": Block,
        "classes": (Block, int),
        "predicate": lambda m: isinstance(m, Block),
        "list": blocks,
        "set": set(blocks),
    }[how]
    assert names(plan(model, units)) == EXPECTED


def test_owners_are_the_layers_that_hold_a_units_parameters():
    model = gpt(1)
    root, block = plan(model, Block).units
    inner = model.children["h"].children["0"]
    assert block.owners == (inner, inner.children["up"])
    assert root.owners == (model.children["embed"], model.children["head"])
    assert root.module is model


def test_a_tied_parameter_goes_to_the_common_ancestor():
    model = gpt()
    first, second = model.children["h"].children.values()
    second.children["up"].params["w0"] = first.children["up"].params["w0"]
    assert names(plan(model)) == {
        ROOT: ["embed.w0", "h.0.up.w0", "head.w0"],
        "h.0": ["h.0.w0"],
        "h.1": ["h.1.w0"],
    }


def test_a_unit_that_is_used_in_two_places_is_one():
    shared = Block([Param()])
    model = Layer(a=shared, b=Items(shared, Layer([Param()])))
    assert names(plan(model, Block)) == {ROOT: ["b.1.w0"], "a": ["a.w0"]}


def test_units_in_each_other():
    outer = Block([Param()], inner=Block([Param()]))
    found = names(plan(Layer(a=outer), Block))
    assert found == {ROOT: [], "a": ["a.w0"], "a.inner": ["a.inner.w0"]}


def test_small_blocks_inside_of_blocks_are_no_units_of_their_own():
    def block():
        return Block(mlp=Items(Layer([Param()]), Layer([Param()])))

    found = names(plan(Layer(h=Items(block(), block()))))
    assert list(found) == [ROOT, "h.0", "h.1"]
    deep = Layer(stages=Items(*[Block(h=Items(block(), block())) for _ in range(2)]))
    inner = [f"stages.{s}{h}" for s in "01" for h in ("", ".h.0", ".h.1")]
    chosen = {u.name for u in plan(deep).units} - {ROOT}
    assert chosen == {name for name in inner if ".h." in name}  # those around them hold nothing


def test_a_wrapper_is_the_unit_and_what_is_inside_gives_the_class():
    model = Layer(h=Items(Wrapper(Block([Param()])), Wrapper(Block([Param()]))))
    expected = {ROOT: [], "h.0": ["h.0.inner.w0"], "h.1": ["h.1.inner.w0"]}
    assert names(plan(model)) == expected == names(plan(model, Block))


def test_small_parameters_persist():
    model = Layer([Param(99), Param(100)])
    found = plan(model, persist_below=100)
    assert [p.spec.name for p in found.persistent] == ["w0"]
    assert names(found) == {ROOT: ["w1"]}
    assert not plan(model, persist_below=0).persistent


def test_parameters_are_divided_in_the_order_of_backward_passes():
    model = gpt()
    model.children["norm"] = Layer([Param(3)])
    found = plan(model)
    specs = {p.param: p.spec.name for u in found.units for p in u.params}
    specs[found.persistent[0].param] = "norm.w0"
    divided = [(n, [specs[p] for p in part]) for n, part in found.divide(list(specs))]
    assert divided == [
        (2, EXPECTED["h.1"]),
        (1, EXPECTED["h.0"]),
        (0, ["head.w0"]),
        (0, ["embed.w0"]),
        (None, ["norm.w0"]),
    ]
    assert list(found.divide([])) == []


@pytest.mark.parametrize(
    ("units", "error", "match"),
    [
        (Wrapper, ValueError, "matches no module.*classes Block, Head, Items, Layer. Give a class"),
        (lambda m: False, ValueError, "matches no module"),
        ([], ValueError, "matches no module"),
        ([3], TypeError, "must be modules of the model, got 3"),
        ("h", TypeError, "must be a module class, a tuple of classes, .*got 'h'"),
        (gpt(), TypeError, "must be a module class"),
    ],
)
def test_units_that_cannot_be(units, error, match):
    with pytest.raises(error, match=match):
        plan(gpt(), units)


def test_a_framework_has_its_own_word_for_modules():
    with pytest.raises(ValueError, match="no layer of the model; it has layers of the classes"):
        plan_units(node(gpt()), UnitOptions(units=[]), base=Layer, noun="layer")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"persist_below": -1}, ValueError),
        ({"persist_below": True}, TypeError),
        ({"persist_below": 1.5}, TypeError),
        ({"reshard_after_forward": 1}, TypeError),
    ],
)
def test_options_are_checked(options, error):
    with pytest.raises(error, match=next(iter(options))):
        UnitOptions(**options)


def test_ranks_with_other_units_are_told():
    def build(c):
        options = UnitOptions(units=[Block, Head][c.rank])
        plan_units(node(gpt()), options, base=Layer).check(options, c)

    with pytest.raises(DisagreementError, match=r"zero\.zeroify"):
        ThreadWorld(2).run(build)


layers = st.deferred(
    lambda: st.builds(
        lambda kind, own, inside: (
            kind(*inside)
            if kind is Items
            else kind(own, **{f"c{i}": c for i, c in enumerate(inside)})
        ),
        st.sampled_from([Layer, Block, Head, Items]),
        st.lists(st.sampled_from(POOL), max_size=2, unique=True),
        st.lists(layers, max_size=3),
    )
)
POOL = [Param(n) for n in (1, 300, 300, 500, 1000, 2000)]  # so some are tied


@settings(max_examples=100, deadline=None)
@given(layers, st.sampled_from([None, Block, lambda m: isinstance(m, (Head, Items))]))
def test_every_parameter_is_in_one_place_around_all_its_uses(model, units):
    try:
        found = plan(model, units)
    except ValueError as error:
        assert "matches no" in str(error)
        return
    tree = node(model)
    uses = {}
    for at in tree.walk():
        for p in at.params:
            uses.setdefault(p.param, []).append(at.module)
    homes = [(p.param, u.module) for u in found.units for p in u.params]
    homes += [(p.param, model) for p in found.persistent]
    assert sorted(map(id, (p for p, _ in homes))) == sorted(map(id, uses))
    assert list(found.order) == list(uses)
    inside = {at.module: {n.module for n in at.walk()} for at in tree.walk()}
    for param, home in homes:
        assert set(uses[param]) <= inside[home]
    divided = list(found.divide(found.order))
    assert sum(len(part) for _, part in divided) == len(found.order)
    for number, part in divided:
        planned = found.persistent if number is None else found.units[number].params
        assert set(part) <= {p.param for p in planned}
    assert all(p.spec.numel < 256 for p in found.persistent)
