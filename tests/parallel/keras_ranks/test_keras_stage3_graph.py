"""Stage 3 in Keras: what a step's graph holds, and that sharing operations changes no number."""

import keras
import keras_world as world
import numpy as np
import stage3_world as stage3
import tensorflow as tf

import zerohvd.keras as zero


class Scaled(keras.layers.Layer):
    """Two of them may differ in a number, or in what they drop out, and in nothing else."""

    def __init__(self, factor=1.0, rate=0.0):
        super().__init__()
        self.factor, self.seen, self.history = factor, None, []
        self.up = keras.layers.Dense(3 * stage3.WIDTH, activation="tanh")
        self.down = keras.layers.Dense(stage3.WIDTH)
        self.drop = keras.layers.Dropout(rate, seed=5)

    def build(self, shape):
        self.up.build(shape)
        self.down.build((*shape[:-1], 3 * stage3.WIDTH))

    def call(self, x):
        self.seen = x
        self.history.append(x)
        return x + self.factor * self.drop(self.down(self.up(x)))


def blocks_of(*arguments):
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Input((7,)), keras.layers.Dense(stage3.WIDTH)]
    layers += [Scaled(*given) for given in arguments]
    return keras.Sequential([*layers, keras.layers.Dense(1)])


def size_of_step(blocks):
    """Operations of a step, those of functions included, and the number of functions."""
    model, opt = zero.zeroify(blocks_of(*[()] * blocks), stage3.adamw(), stage=3, persist_below=0)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError()(y, model(x, training=True))
        opt.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    part = slice(stage3.RANK, stage3.RANK + 4)
    graph = step.get_concrete_function(stage3.X[part], stage3.Y[part]).graph.as_graph_def()
    functions = graph.library.function
    return len(graph.node) + sum(len(f.node_def) for f in functions), len(functions)


def test_what_blocks_have_in_common_is_in_the_graph_once():
    (two, functions), (six, functions_of_six) = size_of_step(2), size_of_step(6)
    assert functions_of_six == functions > 0
    # One such block's backward pass and update alone are more than 200.
    assert six - two <= 4 * 260, (two, six)


def test_blocks_that_differ_in_a_number_alone_do_not_share_it():
    def make():
        return blocks_of((1.0,), (1.0,), (0.25,), (-2.0,), (0.25,))

    stage3.compare(make, stage3.X, stage3.Y, keras.losses.MeanSquaredError)


@world.at_two_ranks
def test_blocks_draw_their_own_masks():
    """All ranks have the same samples, and so the masks of plain Keras."""
    part = stage3.PER_RANK * stage3.STEPS
    x, y = stage3.X[:part], stage3.Y[:part]

    def trained(model, optimizer):
        model.compile(optimizer=optimizer, loss="mse")
        model.fit(stage3.data(x, y, stage3.PER_RANK), verbose=0)
        return model

    def make():
        return blocks_of((1.0, 0.3), (1.0, 0.3), (1.0, 0.5))

    plain = trained(make(), stage3.adamw())
    model = trained(*zero.zeroify(make(), stage3.adamw(), stage=3))
    stage3.assert_same_weights(model, plain)


def test_what_a_layer_keeps_for_its_user_is_of_the_forward_pass():
    model, opt = zero.zeroify(blocks_of((), ()), stage3.adamw(), stage=3)
    block = model.layers[1]

    @tf.function
    def step(x, y):
        block.history.clear()
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError()(y, model(x, training=True))
        opt.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return block.seen, *block.history

    seen, *history = step(stage3.X[:4], stage3.Y[:4])
    assert seen.shape == (4, stage3.WIDTH) and np.isfinite(seen).all()
    assert history and all(np.array_equal(h, seen) for h in history)
