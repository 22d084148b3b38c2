"""A Monitor for Keras: where the time of a run goes, what it holds and moves, who is slow."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from zerohvd import limits
from zerohvd.communication.log import Record
from zerohvd.keras import compat
from zerohvd.keras.communication.clock import Clock
from zerohvd.keras.optimizer.distributed import optimizer_of
from zerohvd.keras.optimizer.entry import explained
from zerohvd.keras.optimizer.report import communication_report, memory_report
from zerohvd.monitoring.meter import split_of
from zerohvd.monitoring.session import EVERY, Session, State, check_every
from zerohvd.monitoring.sinks import open_sinks
from zerohvd.monitoring.trace import Trace, open_trace


class Monitor(keras.callbacks.Callback):
    """Shows what a run does while it runs, every few steps.

        model.fit(data, callbacks=[zero.callbacks.Monitor(samples=64, to=["console", "run.jsonl"])])

    A record has the time of a step, split into compute, exposed communication (from the last
    gradient on, the time in which a collective was under way; at stage 3 the same of the whole
    step) and update; samples per second of all ranks; the norm of the gradients before they are
    clipped; the loss scale and skipped steps; bytes per collective; memory by kind and the peak of
    the process; and the rank that the others wait for, by name. The ranks' numbers meet in one
    small allgather per record, for which no rank waits.

    All ranks pass it to `fit`, and the first one writes. Its times are measured inside of the
    step's graph, which is traced anew if it was made without a Monitor. With `steps_per_execution`,
    a step is one execution.

    Args:
        every: Steps per record.
        samples: That this rank trains on per step, for samples per second.
        to: Where records go: "console", a file that ends with .jsonl or .csv, "tensorboard:FOLDER",
            or any object with `log(dict)`, such as a run of Weights & Biases; or several of these.
        trace: A folder for traces, one per rank; `zerohvd trace merge FOLDER` makes one file of
            them.

    Attributes:
        monitors_every: Steps per record; ranks compare it when `fit` begins.
    """

    def __init__(
        self,
        every: int = EVERY,
        *,
        samples: float | None = None,
        to: Any = "console",
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self.monitors_every = check_every(every)
        self._samples, self._to, self._folder = samples, to, trace
        self._session: Session | None = None
        self._trace: Trace | None = None
        self._last = 0.0  # when the last step ended
        self._counts = (0, 0)
        self._records: dict[str, Record] = {}  # what each collective moves, for the trace
        open_sinks(to, write=False)

    @property
    def last(self) -> dict[str, Any] | None:
        """The latest record, on every rank."""
        return None if self._session is None else self._session.last

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        optimizer = optimizer_of(self.model)
        if optimizer is None:
            raise TypeError("zero.callbacks.Monitor needs a model with a zero.DistributedOptimizer")
        if optimizer.clock is None:
            optimizer.set_clock(Clock())
            # One that was traced before has no timestamps in it.
            self.model.make_train_function(force=True)
        if self._session is None:
            self._counts = _counts(optimizer)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._last = time.time()  # what lies between epochs is of no step

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        optimizer = optimizer_of(self.model)
        if optimizer is not None and optimizer.clock is not None:
            first = self.monitors_every == 1
            optimizer.clock.expect(first if self._session is None else self._session.is_due)

    def _begin(self, optimizer: Any) -> Session:
        """Begin when a step has been made: the optimizer is built by then."""
        wire = optimizer.step.wire
        hosts = getattr(wire.eager, "hosts", ()) or [socket.gethostname()]
        members = wire.eager.members
        if self._folder is not None:
            self._trace = open_trace(self._folder, members[wire.rank], hosts[wire.rank])
        return Session(
            _Exchange(wire),
            rank=wire.rank,
            hosts=hosts,
            members=members,
            every=self.monitors_every,
            samples=self._samples,
            sinks=open_sinks(self._to, write=wire.rank == 0),
            start=self._counts[1],
        )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        now = time.time()
        optimizer = optimizer_of(self.model)
        if optimizer is None or optimizer.step is None:
            return
        first = self._session is None
        if self._session is None:
            self._session = self._begin(optimizer)
        session, split = self._session, None
        if not first:
            split = self._measure(optimizer, self._last, now)
        due = session.is_due
        skipped = 0
        if due:
            before, self._counts = self._counts, _counts(optimizer)
            skipped = max(0, self._counts[0] - before[0] - (self._counts[1] - before[1]))
            session.log(**{k: v for k, v in (logs or {}).items() if np.ndim(v) == 0})
        session.end_step(split, lambda: _state(optimizer), skipped=skipped)
        self._last = time.time() if first else now

    def _measure(self, optimizer: Any, start: float, stop: float) -> Any:
        times = optimizer.clock.read()
        spans = {n: s for n, s in times.collectives.items() if start <= s[0] <= s[1] <= stop}
        gradients = times.gradients if start <= times.gradients <= stop else stop
        everywhere = optimizer.sharded is not None
        split = split_of(start, stop, gradients, list(spans.values()), everywhere=everywhere)
        if self._trace is not None:
            assert self._session is not None
            to_trace = time.perf_counter() - time.time()
            step = f"step {self._session.steps + 1}"
            self._trace.span(step, start + to_trace, stop + to_trace, **split._asdict())
            self._trace.span("update", gradients + to_trace, stop + to_trace)
            if not spans.keys() <= self._records.keys():
                unknown = {n: Record(n, "collective", "", 0, 0, 0) for n in spans}
                self._records = unknown | _records(optimizer)
            for name, (begin, end) in spans.items():
                self._trace.collective(self._records[name], begin + to_trace, end + to_trace)
        return split

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._session is not None:
            self._session.finish()
        if self._trace is not None:
            self._trace.flush()


def _counts(optimizer: Any) -> tuple[int, int]:
    """Steps that were tried, and those that were applied."""
    tried = 0 if optimizer.step is None else int(optimizer.step.wire.step)
    return tried, int(compat.iterations(optimizer.inner_optimizer).numpy())


def _records(optimizer: Any) -> dict[str, Record]:
    log = optimizer.step.wire.traffic.log()
    if optimizer.sharded is not None:
        optimizer.sharded.units.moved.add_to(log)
    return {record.name: record for record in log.records}


def _state(optimizer: Any) -> State:
    clock = optimizer.clock
    return State(
        memory=memory_report(optimizer),
        moved=communication_report(optimizer),
        square=float(clock.square.numpy()) if clock.has_squares else None,
        replicated=optimizer.config.stage == 0,
        loss_scale=optimizer.loss_scale,
    )


class _InThread:
    """The numbers of all ranks, on their way: TensorFlow would wait for them."""

    def __init__(self, gather: Any, numbers: Any) -> None:
        self._gather, self._numbers = gather, numbers
        self._found: Any = None
        self._error: BaseException | None = None
        # A daemon: Horovod ends the collective of a job that fails, and nobody asks any more.
        self._thread = threading.Thread(target=self._run, name="zerohvd-monitor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._gather(self._numbers).numpy().tolist()
        except BaseException as error:
            self._error = error

    def result(self) -> list[list[float]]:
        self._thread.join()
        with limits.during("model.fit() with a Monitor"), explained():
            if self._error is not None:
                raise self._error
        rows: list[list[float]] = self._found
        return rows


class _Alone:
    def __init__(self, numbers: Sequence[float]) -> None:
        self._numbers = numbers

    def result(self) -> list[list[float]]:
        return [list(self._numbers)]


class _Exchange:
    def __init__(self, wire: Any) -> None:
        self._wire = wire
        self._gather: Any = None

    def __call__(self, numbers: Sequence[float]) -> _InThread | _Alone:
        if self._wire.size == 1:
            return _Alone(numbers)
        said = tf.constant([list(numbers)], tf.float64)
        if self._gather is None:
            how = self._wire.options(f"{self._wire.prefix}/watched")

            @tf.function(autograph=False)
            def gather(x: Any) -> Any:  # in a graph, or it would have no name of its own
                return hvd.allgather(x, **how)

            self._gather = gather.get_concrete_function(said)
        return _InThread(self._gather, said)
