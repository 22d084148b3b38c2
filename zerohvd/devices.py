"""Each rank trains on a device of its own: checked before the first step, by what all ranks say."""

from __future__ import annotations

from collections.abc import Sequence

from zerohvd.errors import DisagreementError


def check_devices(hosts: Sequence[str], devices: Sequence[str | None], *, fix: str) -> None:
    """Raise the same error on every rank unless each has its own device, or none has any.

    Two processes on one GPU get half of it each, and NCCL refuses them in words of its own.

    Args:
        hosts: Of the ranks, in rank order.
        devices: What each rank trains on, such that equal texts on one host are one device; None:
            on the CPU; "": it is not known.
        fix: The line that gives a rank its own.
    """
    without = [rank for rank, device in enumerate(devices) if device is None]
    others = [rank for rank, device in enumerate(devices) if device]
    if without and others:
        raise DisagreementError(
            f"ranks {without} train on the CPU and ranks {others} on a GPU. Put the model on the "
            f"same kind of device everywhere: {fix}"
        )
    used: dict[tuple[str, str], int] = {}
    for rank, (host, device) in enumerate(zip(hosts, devices, strict=True)):
        if not device:
            continue
        first = used.setdefault((host, device), rank)
        if first != rank:
            raise DisagreementError(
                f"ranks {first} and {rank} train on the same GPU of host {host} ({device}). Every "
                f"rank needs its own, by its local rank: {fix}"
            )
