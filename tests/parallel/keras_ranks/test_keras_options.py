"""Keras' options keep their meaning."""

import keras
import keras_world as world
import numpy as np
import pytest
import tensorflow as tf

import zerohvd.keras as zero

opts = keras.optimizers

BITWISE = {
    "clipvalue": lambda: opts.Adam(0.01, clipvalue=0.01),
    "weight_decay": lambda: opts.AdamW(0.01, weight_decay=0.1),
    "momentum": lambda: opts.SGD(0.01, momentum=0.9, nesterov=True, weight_decay=0.01),
    "amsgrad": lambda: opts.Adam(0.01, amsgrad=True),
    "ema": lambda: opts.SGD(0.1, use_ema=True, ema_momentum=0.9),
    "ema_overwrite": lambda: opts.Adam(
        0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "accumulation": lambda: opts.Adam(0.01, gradient_accumulation_steps=2),
    "loss_scale_factor": lambda: opts.Adam(0.01, loss_scale_factor=128.0),
    "schedule": lambda: opts.Adam(opts.schedules.ExponentialDecay(0.1, 2, 0.5)),
}
CLOSE = {
    "clipnorm": lambda: opts.SGD(0.1, clipnorm=0.05),
    "global_clipnorm": lambda: opts.SGD(0.1, global_clipnorm=0.05),
    "nadam_clipnorm": lambda: opts.Nadam(0.01, clipnorm=0.05),
    "whole_clipnorm": lambda: opts.Lamb(0.01, clipnorm=0.05),
    "accumulation_clip_ema": lambda: opts.Adam(
        0.01,
        gradient_accumulation_steps=2,
        global_clipnorm=0.05,
        use_ema=True,
        ema_overwrite_frequency=1,
        ema_momentum=0.3,
    ),
}


@pytest.mark.parametrize("option", world.few(BITWISE, "ema_overwrite"))
def test_option(option):
    got, _ = world.sharded(BITWISE[option])
    world.assert_same(got, world.plain(BITWISE[option]))


@pytest.mark.parametrize("option", world.few(CLOSE, "clipnorm accumulation_clip_ema"))
def test_option_with_norms(option):
    got, _ = world.sharded(CLOSE[option])
    world.assert_same(got, world.plain(CLOSE[option]), bitwise=False)
    world.assert_ranks_agree(got)


@world.at_two_ranks
def test_stage_1_reduces_accumulated_gradients_once():
    make = BITWISE["accumulation"]
    got, optimizer = world.sharded(make, stage=1, steps=4)
    world.assert_same(got, world.plain(make), bitwise=False)
    expected = {"reducescatter", "allgather"} if world.SIZE > 1 else set()
    assert set(zero.communication_report(optimizer)) - {"total"} == expected
    got, optimizer = world.sharded(make, stage=1, steps=3)
    assert set(zero.communication_report(optimizer)) == {"total"}


@world.at_two_ranks
def test_grad_clip_is_global_clipnorm():
    got, _ = world.sharded(lambda: opts.SGD(0.1), grad_clip=0.05)
    world.assert_same(got, world.plain(CLOSE["global_clipnorm"]), bitwise=False)


@world.at_two_ranks
@pytest.mark.parametrize("by", ["names", "variables"])
def test_weight_decay_exclusions(by):
    def exclude(optimizer, model):
        if by == "names":
            optimizer.exclude_from_weight_decay(var_names=["bias"])
        else:
            optimizer.exclude_from_weight_decay(var_list=model.trainable_variables[:2])

    results = []
    for distributed in (False, True):
        model, optimizer = world.make_model(), opts.AdamW(0.01, weight_decay=0.5)
        if distributed:
            optimizer = zero.DistributedOptimizer(optimizer)
        exclude(optimizer, model)
        results.append(world.loop(model, optimizer, reduce=not distributed))
    world.assert_same(results[1], results[0])


@world.at_two_ranks
def test_constraints_see_whole_variables():
    def model():
        return world.make_model(kernel_constraint=keras.constraints.MaxNorm(0.3))

    got, _ = world.sharded(lambda: opts.SGD(0.5), model())
    world.assert_same(got, world.plain(lambda: opts.SGD(0.5), model()))


@world.at_two_ranks
def test_final_averages_are_written_to_the_model():
    results = []
    for distributed in (False, True):
        model, optimizer = world.make_model(), BITWISE["ema"]()
        if distributed:
            optimizer = zero.DistributedOptimizer(optimizer)
        world.loop(model, optimizer, reduce=not distributed)
        optimizer.finalize_variable_values(model.trainable_variables)
        results.append(world.weights(model))
    world.assert_same(results[1], results[0])


@world.at_two_ranks
def test_learning_rate_and_iterations_are_the_inner_ones():
    _got, optimizer = world.sharded(lambda: opts.Adam(0.01))
    assert int(optimizer.iterations) == world.STEPS
    assert int(optimizer.inner_optimizer.iterations) == world.STEPS
    optimizer.learning_rate = 0.5
    assert float(optimizer.inner_optimizer.learning_rate) == 0.5
    assert optimizer.beta_1 == 0.9
    with pytest.raises(AttributeError):
        _ = optimizer.no_such_thing


@world.at_two_ranks
def test_eager_loops():
    def make():
        return opts.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)

    eager, _ = world.sharded(make, eager=True)
    world.assert_same(eager, world.plain(make, eager=True))
    # TensorFlow fuses operations in graphs, which then round differently on some processors.
    world.assert_same(eager, world.plain(make), bitwise=False)


def test_frozen_variables_are_left_alone_until_they_are_not():
    """Rank 0 owns nothing but frozen variables for a while, and takes part all the same."""
    results = []
    for distributed in (False, True):
        model, optimizer = world.make_model(), opts.AdamW(0.01, weight_decay=0.1)
        if distributed:
            optimizer = zero.DistributedOptimizer(optimizer)
        world.loop(model, optimizer, reduce=not distributed, steps=2)
        before = [v.numpy() for v in model.layers[0].weights]
        model.layers[0].trainable = False
        world.loop(model, optimizer, reduce=not distributed, steps=2)
        for then, now in zip(before, model.layers[0].weights, strict=True):
            np.testing.assert_array_equal(then, now.numpy())
        model.layers[0].trainable = True
        results.append(world.loop(model, optimizer, reduce=not distributed, steps=2))
    world.assert_same(results[1], results[0])


# What is set on the optimizer after a few steps.
CHANGES = {
    "momentum": (lambda: opts.SGD(0.1, momentum=0.9), {"momentum": 0.5, "nesterov": True}),
    "betas": (lambda: opts.Adam(0.01), {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-3}),
    "clipping": (lambda: opts.SGD(0.1, clipvalue=1e-2), {"clipvalue": None, "clipnorm": 0.05}),
    "decay": (lambda: opts.AdamW(0.01), {"weight_decay": 0.5, "learning_rate": 0.02}),
    "variable": (lambda: opts.Adam(0.01), {"beta_1": lambda: tf.Variable(0.5)}),
    "schedule": (
        lambda: opts.SGD(0.1),
        {"learning_rate": lambda: opts.schedules.ExponentialDecay(0.2, 1, 0.5)},
    ),
    "accumulation": (
        lambda: opts.Adam(0.01, gradient_accumulation_steps=2),
        {"gradient_accumulation_steps": 4},
    ),
}


@pytest.mark.parametrize("change", world.few(CHANGES, "momentum"))
@pytest.mark.parametrize("again", ["eager", "traced_again"])
def test_attributes_set_during_training_reach_the_inner_optimizer(change, again):
    """In a graph from the next trace on, as in plain Keras."""
    make, attributes = CHANGES[change]
    results = []
    for distributed in (False, True):
        model, optimizer = world.make_model(), make()
        if distributed:
            optimizer = zero.DistributedOptimizer(optimizer)
        eager = again == "eager"
        world.loop(model, optimizer, reduce=not distributed, eager=eager)
        for name, value in attributes.items():
            setattr(optimizer, name, value() if callable(value) else value)
        results.append(world.loop(model, optimizer, reduce=not distributed, eager=eager))
    world.assert_same(results[1], results[0], bitwise=False, tolerance=2e-6)


@world.at_two_ranks
def test_a_trace_keeps_the_attributes_it_was_made_with():
    results = []
    for distributed in (False, True):
        model, optimizer = world.make_model(), opts.SGD(0.1, momentum=0.9)
        if distributed:
            optimizer = zero.DistributedOptimizer(optimizer)
        model.compile(optimizer, "mse")
        x, y = world.batch(0) if distributed else world.union(0)
        for _ in range(2):
            model.fit(x, y, batch_size=len(x), epochs=2, verbose=0)
            optimizer.momentum = 0.1
        model.compile(optimizer, "mse")
        model.fit(x, y, batch_size=len(x), epochs=2, verbose=0)
        results.append(world.weights(model))
    world.assert_same(results[1], results[0], bitwise=False, tolerance=1e-5)


@world.at_two_ranks
def test_attributes_of_the_wrapper_the_scaler_and_nobody():
    scaled = opts.LossScaleOptimizer(opts.SGD(0.1), dynamic_growth_steps=9)
    optimizer = zero.DistributedOptimizer(scaled)
    optimizer.dynamic_growth_steps = 3
    assert scaled.dynamic_growth_steps == optimizer.dynamic_growth_steps == 3
    optimizer.note = "mine"
    assert optimizer.note == "mine" and not hasattr(optimizer.inner_optimizer, "note")
    optimizer.name = "other"
    assert optimizer.inner_optimizer.name != "other"


@world.at_two_ranks
def test_accumulation_cannot_begin_after_the_build():
    _, optimizer = world.sharded(lambda: opts.SGD(0.1), steps=1)
    optimizer.gradient_accumulation_steps = 2
    with pytest.raises(ValueError, match="when you create it"):
        optimizer.apply([tf.zeros_like(v) for v in optimizer.step.natives])


def test_unused_variables_are_left_alone_and_missing_ones_count_as_zero():
    model = world.make_model()
    extra = keras.Variable(np.ones(3, "float32"), name="hardly_used")
    optimizer = zero.DistributedOptimizer(opts.AdamW(0.1, weight_decay=0.5))
    variables = [*model.trainable_variables, extra]
    before = world.weights(model)
    for step in range(2):
        x, y = world.batch(step)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        if world.RANK == 0 and world.SIZE > 1:
            grads[0] = None  # this rank did not use it, others did
        optimizer.apply([*grads, None], variables)
    np.testing.assert_array_equal(extra.numpy(), np.ones(3))
    assert not np.array_equal(before[0], world.weights(model)[0])
    world.assert_ranks_agree(world.weights(model))
    optimizer.apply([*grads, tf.ones(3)], variables)  # its first gradient comes late
    assert np.all(extra.numpy() < 1)
