"""Train a small classifier with Keras 3, its optimizer state shared out among the ranks.

mpirun -np 2 python examples/keras_fit.py            (or: horovodrun -np 2, srun -n 2)
"""

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import zerohvd.keras as zero

hvd.init()

rng = np.random.default_rng(0)
centres = rng.normal(size=(10, 32)).astype("float32")
labels = rng.integers(0, 10, size=2000)
samples = centres[labels] + 0.5 * rng.normal(size=(2000, 32)).astype("float32")
# As one process would train: 64 samples a step, the last batch smaller. Ranks share each batch.
dataset = tf.data.Dataset.from_tensor_slices((samples, labels)).shuffle(2000, seed=1).batch(64)

model = keras.Sequential(
    [
        keras.layers.Input((32,)),
        keras.layers.Dense(512, activation="relu"),
        keras.layers.Dense(512, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
optimizer = zero.DistributedOptimizer(keras.optimizers.AdamW(1e-3), stage=2)
model.compile(optimizer, loss="sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
model.fit(
    zero.shard_dataset(dataset),
    epochs=2,
    callbacks=[
        zero.callbacks.MetricAverage(),
        zero.callbacks.Checkpoint("keras_fit.keras", monitor="loss", save_best_only=True),
    ],
)

if hvd.rank() == 0:
    print(f"held by each of {hvd.size()} ranks:", zero.memory_report(model), sep="\n")
    print("sent by each rank in one step:", zero.communication_report(model), sep="\n")
