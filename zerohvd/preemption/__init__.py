"""Leaving in time: a signal, or the end of a job's time, becomes a checkpoint to go on from.

`zero.preemption` and `zero.callbacks.Preemption` of the adapters are made of what is here. A script
that may be signalled while it still imports its framework begins with

    from zerohvd.preemption import listen
    listen()
"""

from __future__ import annotations

from zerohvd.preemption.signals import listen, spare_worker

__all__ = ["listen", "spare_worker"]
