"""The arguments of hvd.DistributedOptimizer for Keras mean what they mean in Horovod."""

import horovod.tensorflow as hvd
import keras
import keras_world as world
import numpy as np
import pytest
import tensorflow as tf

import zerohvd.keras as zero

RANKS = (2, 3)


def make():
    return keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.7)


def expected(*, gain=1.0, passes=1):
    """Plain Keras on the union of the batches, with Horovod's arithmetic."""
    model, optimizer, sums = world.make_model(), make(), None
    variables = model.trainable_variables
    for step in range(world.STEPS):
        x, y = world.union(step)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        grads = tape.gradient(loss, variables)
        sums = grads if sums is None else [s + g for s, g in zip(sums, grads, strict=True)]
        if (step + 1) % passes == 0:
            scaled = [s * gain for s in sums]
            optimizer.apply_gradients(zip(scaled, variables, strict=True))
            sums = None
    return world.weights(model)


def trained(stage, **arguments):
    """By an optimizer that has been through its configuration."""
    optimizer = zero.DistributedOptimizer(make(), stage=stage, **arguments)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert again.get_config() == optimizer.get_config()
    return world.loop(world.make_model(), again, reduce=False, eager=True)


CASES = {
    "sum": ({"op": hvd.Sum}, {"gain": world.SIZE}),
    "average": ({"op": hvd.Average}, {}),
    "passes": ({"backward_passes_per_step": 2}, {"passes": 2}),
    "averaged_passes": (
        {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
        {"passes": 2, "gain": 0.5},
    ),
    "sum_of_passes": (
        {"backward_passes_per_step": 2, "op": hvd.Sum},
        {"passes": 2, "gain": world.SIZE},
    ),
    "without_effect": (
        {
            "num_groups": 2, "groups": 3, "sparse_as_dense": True, "device_dense": "",
            "device_sparse": "", "gradient_predivide_factor": 2.0, "scale_local_gradients": True,
            "compression": hvd.Compression.none,
        },
        {},
    ),
}  # fmt: skip


def test_results_are_those_of_horovod():
    for case, (arguments, oracle) in CASES.items():
        wanted = expected(**oracle)
        for stage in (0, 1, 2) if world.SIZE == 2 else (2,):
            got = trained(stage, **arguments)
            for g, e in zip(got, wanted, strict=True):
                np.testing.assert_allclose(g, e, rtol=2e-5, atol=1e-6, err_msg=f"{case} {stage}")


@world.at_two_ranks
def test_compression_is_the_dtype_on_the_wire():
    optimizer = zero.DistributedOptimizer(make(), compression=zero.Compression.fp16)
    assert optimizer.config.reduce_dtype == "float16"


@world.at_two_ranks
def test_what_has_no_meaning_is_refused_with_the_line_to_write():
    for arguments, words in (
        ({"op": hvd.Adasum}, "Write op=hvd.Average"),
        ({"compression": "fp16"}, "hvd.Compression.none or .fp16"),
        ({"compression": hvd.Compression.fp16, "reduce_dtype": "bfloat16"}, "give one of them"),
        ({"backward_passes_per_step": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            zero.DistributedOptimizer(make(), **arguments)
    with pytest.raises(TypeError, match=r"\['momentum'\].*given to it"):
        zero.DistributedOptimizer(make(), momentum=0.9)
    twice = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match="both set"):
        zero.DistributedOptimizer(twice, backward_passes_per_step=2)


@world.at_two_ranks
def test_a_process_set_survives_the_configuration_or_is_asked_for(members):
    config = zero.DistributedOptimizer(make(), process_set=members).get_config()
    assert config["process_set"] == [1]
    again = zero.DistributedOptimizer.from_config(config)
    assert again.process_set is members
    # As loaded in a job that has other sets.
    lost = zero.DistributedOptimizer.from_config({**config, "process_set": [0, 5]})
    assert lost.get_config()["process_set"] == [0, 5]
    model = world.make_model()
    model.compile(lost, "mse")
    with pytest.raises(ValueError, match=r"ranks \[0, 5\].*model.optimizer.process_set = "):
        model.fit(world.X, world.Y, verbose=0)
    model.optimizer.process_set = None
    model.fit(*world.batch(0), verbose=0)
    world.assert_ranks_agree(world.weights(model))
    with pytest.raises(ValueError, match="before the first step"):
        model.optimizer.process_set = members
