"""A Monitor for PyTorch: where the time of a run goes, what it holds and moves, who is slow."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from zerohvd.communication.collectives import Handle
from zerohvd.communication.log import Watcher
from zerohvd.monitoring.meter import Meter
from zerohvd.monitoring.session import EVERY, Session, State
from zerohvd.monitoring.sinks import open_sinks
from zerohvd.monitoring.trace import open_trace
from zerohvd.torch.communication.collectives import LocalCollectives, TorchCollectives
from zerohvd.torch.monitoring.report import communication_report, memory_report
from zerohvd.torch.optimizer.zero_optimizer import ZeroOptimizer


class Monitor:
    """Shows what a run does while it runs, every few steps.

        monitor = zero.Monitor(opt, samples=32, to=["console", "run.jsonl"])     # on all ranks
        for batch in loader:
            ...
            opt.step()
            monitor.log(loss=loss)                                               # if you like

    A record has the time of a step, split into compute, exposed communication (waiting for
    collectives) and update; samples per second of all ranks; the norm of the gradients before they
    are clipped; the loss scale and skipped steps; bytes per collective; memory by kind and the peak
    of the process; and the rank that the others wait for, by name. The ranks' numbers meet in one
    small allgather per record, for which no rank waits.

    All ranks make it, and the first one writes. Close it, or leave it to the end of the script.

    Args:
        opt: Made by `zero.DistributedOptimizer` or `zero.zeroify`.
        every: Steps per record.
        samples: That this rank trains on per step, for samples per second; not needed where
            `zero.weight(n)` says it.
        to: Where records go: "console", a file that ends with .jsonl or .csv, "tensorboard:FOLDER",
            or any object with `log(dict)`, such as a run of Weights & Biases; or several of these.
        trace: A folder for traces, one per rank; `zerohvd trace merge FOLDER` makes one file of
            them.
        start: Steps that were made before, in a run that is resumed: records go on from there.
    """

    def __init__(
        self,
        opt: ZeroOptimizer,
        every: int = EVERY,
        *,
        samples: float | None = None,
        to: Any = "console",
        trace: str | os.PathLike[str] | None = None,
        start: int = 0,
    ) -> None:
        if not isinstance(opt, ZeroOptimizer):
            raise TypeError(
                f"expected an optimizer made by zero.DistributedOptimizer, got {type(opt).__name__}"
            )
        if opt.watcher is not None:
            raise ValueError("this optimizer has a zero.Monitor already: close() that one first")
        c = opt.collectives
        sinks = open_sinks(to, write=c.rank == 0)
        hosts = c.hosts if isinstance(c, TorchCollectives) else [socket.gethostname()]
        self._session = Session(
            _Exchange(c, f"{opt.prefix}/watched"),
            rank=c.rank,
            hosts=hosts,
            members=c.members,
            every=every,
            samples=samples,
            sinks=sinks,
            start=start,
        )
        self._meter = Meter()
        host = hosts[c.rank] if hosts else ""
        self._trace = None if trace is None else open_trace(trace, c.members[c.rank], host)
        self._watchers: list[Watcher] = [self._meter]
        if self._trace is not None and self._trace not in c.log.watchers:
            self._watchers.append(self._trace)  # not twice: ZEROHVD_TRACE may be the same folder
        self._opt = weakref.ref(opt)
        self._scaler: Any = None
        self._samples: float | None = None
        self._began: float | None = None
        c.log.watchers.extend(self._watchers)
        self._hooks = [
            opt.register_step_pre_hook(self._before),
            opt.register_step_post_hook(self._after),
        ]
        opt.watch(self, every)

    @property
    def last(self) -> dict[str, Any] | None:
        """The latest record, on every rank."""
        return self._session.last

    def log(self, **values: Any) -> None:
        """Add numbers, or tensors of one element, to the next record: their mean over its steps.

        `loss` is the mean over the ranks; others are those of the first rank.
        """
        self._session.log(
            **{k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        )

    def close(self) -> None:
        """End monitoring; all ranks must call it after the same step."""
        opt = self._opt()
        for hook in self._hooks:
            hook.remove()
        if opt is not None and opt.watcher is self:
            opt.watch(None)
            log = opt.collectives.log
            log.watchers[:] = [w for w in log.watchers if w not in self._watchers]
        if self._trace is not None:
            self._trace.flush()
        self._session.finish()

    # -- a step ------------------------------------------------------------------------------------

    def _before(self, opt: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._meter.begin_update()
        self._began = time.perf_counter()
        self._samples = kwargs.get("weight")
        if self._samples is None:
            self._samples = opt.gradients.weight

    def _after(self, opt: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._end(opt, skipped=False)

    def closure_ended(self) -> None:
        """Note that what `step()` has done so far was compute."""
        self._meter.begin_update(anew=True)

    def scaled_by(self, scaler: Any) -> None:
        """Note who scales the loss."""
        self._scaler = scaler
        self._meter.begin_update()

    def skipped(self) -> None:
        """Note a step that was not applied."""
        opt = self._opt()
        if opt is not None:
            self._end(opt, skipped=True)

    def _end(self, opt: ZeroOptimizer, *, skipped: bool) -> None:
        split = self._meter.end_step()
        now = time.perf_counter()
        if self._trace is not None:
            if split is not None:
                step = self._session.steps + 1
                self._trace.span(f"step {step}", now - split.seconds, now, **split._asdict())
            if self._began is not None:
                self._trace.span("opt.step()", self._began, now)
        samples, self._samples, self._began = self._samples, None, None
        self._session.end_step(split, self._state, samples=samples, skipped=int(skipped))

    def _state(self) -> State:
        opt = self._opt()
        assert opt is not None  # it has just made a step
        gradients = opt.gradients
        known = gradients.norm_seen
        return State(
            memory=memory_report(opt),
            moved=communication_report(opt),
            square=None if known is not None else gradients.square(),
            grad_norm=known,
            replicated=gradients.replicated,
            loss_scale=None if self._scaler is None else self._scaler.get_scale(),
            peak=_peak_on_gpu(opt),
        )


def _peak_on_gpu(opt: ZeroOptimizer) -> int:
    device = next((p.device for p in opt.all_params()), None)
    if device is None or device.type != "cuda":
        return 0
    return int(torch.cuda.max_memory_allocated(device))


class _Gathered:
    """Rows of numbers, on their way."""

    def __init__(self, handle: Handle, out: torch.Tensor, rows: int) -> None:
        self._handle, self._out, self._rows = handle, out, rows

    def result(self) -> list[list[float]]:
        self._handle.wait()
        rows: list[list[float]] = self._out.view(self._rows, -1).tolist()
        return rows


class _Exchange:
    def __init__(self, collectives: TorchCollectives | LocalCollectives, name: str) -> None:
        self._collectives, self._name = collectives, name

    def __call__(self, numbers: Sequence[float]) -> _Gathered:
        c = self._collectives
        own = torch.from_numpy(np.array(numbers, np.float64))
        out = own.new_zeros(c.size * len(own))
        with c.log.not_counting():
            handle = c.gather_into(out, own, [len(own)] * c.size, name=self._name)
        return _Gathered(handle, out, c.size)
