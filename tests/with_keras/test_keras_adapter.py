"""What the Keras adapter says before any training, in one process."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("keras")
pytest.importorskip("horovod.tensorflow")


def _python(code, *args, **env):
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_another_backend_is_refused_with_the_setting_to_make():
    result = _python("import zerohvd.keras", KERAS_BACKEND="jax")
    assert result.returncode != 0
    assert "KERAS_BACKEND=tensorflow" in result.stderr


def test_one_copy_of_the_adapter():
    result = _python("import tf_adapter")
    assert "import zerohvd.keras" in result.stderr


@pytest.fixture(scope="module")
def zero():
    # One process without a launcher: some MPI installations cannot start one of those.
    os.environ.setdefault("HOROVOD_CONTROLLER", "gloo")
    os.environ.setdefault("HOROVOD_CPU_OPERATIONS", "gloo")
    import horovod.tensorflow as hvd

    hvd.init()
    import zerohvd.keras

    return zerohvd.keras


def test_wrong_settings_say_what_to_do(zero):
    import keras

    adam = keras.optimizers.Adam
    with pytest.raises(ValueError, match="stage must be one of"):
        zero.DistributedOptimizer(adam(), stage=7)
    with pytest.raises(ValueError, match=r"zero\.zeroify\(model, opt, stage=3\)"):
        zero.DistributedOptimizer(adam(), stage=3).build([keras.Variable([1.0])])
    with pytest.raises(TypeError, match="got None"):
        zero.DistributedOptimizer(None)
    with pytest.raises(TypeError, match="wrap it once"):
        zero.DistributedOptimizer(zero.DistributedOptimizer(adam()))
    with pytest.raises(ValueError, match="use one of grad_clip"):
        zero.DistributedOptimizer(adam(clipnorm=1.0), grad_clip=1.0)
    built = adam()
    built.build([keras.Variable([1.0])])
    with pytest.raises(ValueError, match="from_config"):
        zero.DistributedOptimizer(built)
    with pytest.raises(ValueError, match="number >= 0"):
        zero.weight(-1)
    with pytest.raises(ValueError, match="not built yet"):
        zero.memory_report(zero.DistributedOptimizer(adam()))
    with pytest.raises(TypeError, match="DistributedOptimizer"):
        zero.communication_report(adam())


def test_public_names(zero):
    assert all(hasattr(zero, name) for name in zero.__all__)


def test_datasets_must_be_batched_and_as_fit_takes_them(zero):
    import tensorflow as tf

    with pytest.raises(ValueError, match="batch_size"):
        zero.shard_dataset(tf.data.Dataset.from_tensor_slices(([1.0], [1.0])))
    with pytest.raises(ValueError, match="sample_weight"):
        zero.shard_dataset(tf.data.Dataset.from_tensors(([1.0], [1.0], [1.0], [1.0])))


_SAVE = """
import horovod.tensorflow as hvd, keras, numpy as np, sys
import zerohvd.keras as zero
hvd.init()
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(zero.DistributedOptimizer(keras.optimizers.Adam(0.1)), loss="mse")
model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
zero.save_model(model, sys.argv[1])
"""

_LOOK = """
import keras, numpy as np, sys
import zerohvd.keras
model = keras.models.load_model(sys.argv[1])
model.evaluate(np.ones((4, 3)), np.ones((4, 1)))
print("loaded at step", int(model.optimizer.iterations))
model.fit(np.ones((4, 3)), np.ones((4, 1)))
"""


def test_a_model_is_loaded_without_horovod_and_trained_with_it(tmp_path):
    path = str(tmp_path / "model.keras")
    alone = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    saved = _python(_SAVE, path, **alone)
    assert saved.returncode == 0, saved.stderr
    looked = _python(_LOOK, path)
    assert "loaded at step 1" in looked.stdout
    assert "call horovod.tensorflow.init() first" in looked.stderr
