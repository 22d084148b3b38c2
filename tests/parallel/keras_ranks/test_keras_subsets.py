"""Steps that update some of the variables: the others are left alone, as in plain Keras."""

import keras
import keras_world as world
import numpy as np
import pytest
import tensorflow as tf

import zerohvd.keras as zero

RANKS = (2, 3)  # every test traces graphs

opts = keras.optimizers

MAKE = {
    "adamw": lambda: opts.AdamW(0.01, weight_decay=0.1),
    "momentum": lambda: opts.SGD(0.1, momentum=0.9),
    "nadam": lambda: opts.Nadam(0.01, clipnorm=0.1),
    "lamb": lambda: opts.Lamb(0.01, weight_decay=0.1, global_clipnorm=0.1),
    "ema": lambda: opts.Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    "accumulating": lambda: opts.AdamW(0.01, weight_decay=0.1, gradient_accumulation_steps=2),
    "scaled": lambda: opts.LossScaleOptimizer(opts.AdamW(0.01), initial_scale=4.0),
}
# What the steps give: (variables, of which gradients are None).
STEPS = [((0, 1, 2, 3), ()), ((0, 1), ()), ((2, 3), ()), ((0, 1, 2, 3), (0, 1)), ((3, 0), ()),
         ((0, 1, 2, 3), ())]  # fmt: skip


def gradients(seed, variables):
    """The same mean over ranks whatever their number."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=v.shape).astype("float32") for v in variables]


def train(optimizer, *, distributed, eager, steps=STEPS):
    model = world.make_model(kernel_constraint=keras.constraints.MaxNorm(0.9))
    variables = model.trainable_variables
    optimizer.build(variables)

    def step(grads, given, missing):
        pairs = [(None if i in missing else grads[i], variables[i]) for i in given]
        optimizer.apply_gradients(pairs)

    run = step if eager else tf.function(step)
    scale = 4.0 if hasattr(optimizer, "dynamic_scale") or optimizer_scaled(optimizer) else 1.0
    for number, (given, missing) in enumerate(steps):
        grads = gradients(number, variables)
        if distributed:
            noise = gradients(1000 + number, variables)
            sign = world.RANK - (world.SIZE - 1) / 2
            grads = [g + sign * n for g, n in zip(grads, noise, strict=True)]
        run([tf.constant(scale * g) for g in grads], given, missing)
    return [*world.weights(model), np.array(int(optimizer.iterations), "float32")]


def optimizer_scaled(optimizer):
    return getattr(optimizer, "scaler", None) is not None


def cases():
    """Every optimizer at stage 2, and at the others what depends on the stage."""
    for name in world.few(MAKE, "adamw nadam accumulating"):
        yield name, 2, False
    if world.SIZE == 2:
        yield from ((n, s, False) for n in ("adamw", "accumulating") for s in (0, 1))
        yield from (("momentum", 1, True), ("accumulating", 2, True), ("scaled", 0, True))


@pytest.mark.parametrize("name, stage, eager", cases())
def test_variables_that_a_step_does_not_give_are_left_alone(name, stage, eager):
    expected = train(MAKE[name](), distributed=False, eager=eager)
    ours = zero.DistributedOptimizer(MAKE[name](), stage=stage)
    got = train(ours, distributed=True, eager=eager)
    world.assert_same(got, expected, bitwise=False, tolerance=2e-5)
    world.assert_ranks_agree(got)


def uses(step, rank):
    """Which variables a rank uses in a step: each has one that others lack at times."""
    rng = np.random.default_rng([step, rank])
    return [bool(b) for b in rng.integers(0, 2, size=3)]


@pytest.mark.parametrize("stage", world.few("012", "2"))
@pytest.mark.parametrize("eager", [False, True] if world.SIZE == 2 else [False])
def test_ranks_that_use_different_variables_update_the_union(stage, eager):
    """A gradient that a rank lacks counts as zero; what no rank uses is left alone."""
    ranks = range(world.SIZE)
    dense = np.random.default_rng(1).normal(size=(8, world.SIZE, 2, 33)).astype("float32")
    ids = np.random.default_rng(2).integers(0, 997, size=(8, world.SIZE, 3)).astype("int32")

    def variables():
        values = [np.ones(33), np.ones(33), np.ones((997, 5))]
        names = ["a", "b", "embeddings"]
        return [keras.Variable(v.astype("float32"), name=n)
                for v, n in zip(values, names, strict=True)]  # fmt: skip

    ours, theirs = variables(), variables()
    plain = MAKE["adamw"]()
    optimizer = zero.DistributedOptimizer(MAKE["adamw"](), stage=int(stage))
    plain.build(theirs)
    optimizer.build(ours)

    def step(a, b, rows, used):
        with tf.GradientTape() as tape:
            loss = sum(
                tf.reduce_sum(x * y) for x, y, use in
                zip(ours, (a, b, None), used, strict=True) if use and y is not None
            ) + (tf.reduce_sum(tf.gather(ours[2].value, rows)) if used[2] else 0.0)  # fmt: skip
        sources = [v.value for v in ours]
        grads = tape.gradient(loss, sources) if any(used) else [None] * 3
        optimizer.apply_gradients(zip(grads, ours, strict=True))

    run = step if eager else tf.function(step, autograph=False)
    for number in range(8):
        patterns = [uses(number, r) for r in ranks]
        if not any(any(p) for p in patterns):
            continue
        grads = [dense[number, :, i][[p[i] for p in patterns]].sum(0) / world.SIZE
                 for i in range(2)]  # fmt: skip
        table = np.zeros((997, 5), "float32")
        for r in ranks:
            if patterns[r][2]:
                np.add.at(table, ids[number, r], 1 / world.SIZE)
        together = [g if any(p[i] for p in patterns) else None
                    for i, g in enumerate([*grads, table])]  # fmt: skip
        plain.apply([None if g is None else tf.constant(g) for g in together], theirs)
        mine = (number, world.RANK)
        run(*(tf.constant(d) for d in dense[mine]), tf.constant(ids[mine]), tuple(uses(*mine)))
    got, expected = ([v.numpy() for v in vs] for vs in (ours, theirs))
    world.assert_same(got, expected, bitwise=False, tolerance=1e-5)
    world.assert_ranks_agree(got)


@world.at_two_ranks
def test_a_variable_that_is_given_twice_is_refused():
    variable = keras.Variable(np.ones(3, "float32"), name="twice")
    optimizer = zero.DistributedOptimizer(opts.SGD(0.1))
    with pytest.raises(ValueError, match="twice"):
        optimizer.apply([tf.ones(3), tf.ones(3)], [variable, variable])
