"""One micro-step over time: what it allocates and frees, and when gradients are complete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Event(NamedTuple):
    """Something that changes what is held."""

    live: int  # bytes of activations and temporaries from here on; no parameters, no gradients
    param: int = -1  # the trained parameter whose gradient is complete now; -1: none


class Timeline(NamedTuple):
    """What one micro-step held besides parameters and gradients, measured."""

    events: tuple[Event, ...]
    saved: int  # bytes kept from the forward for the backward pass, the most at one time
    how: str  # how it was measured, in words

    @property
    def peak(self) -> int:
        """The most bytes of activations and temporaries at one time."""
        return max((event.live for event in self.events), default=0)

    def scaled(self, factor: float) -> Timeline:
        """The same for another number of samples."""
        events = tuple(e._replace(live=int(e.live * factor)) for e in self.events)
        return Timeline(events, int(self.saved * factor), f"{self.how}, scaled by {factor:g}")


def thinned(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events without those that are no peak: none of gradients, none of the highest between
    two gradients is lost."""
    kept: list[Event] = []
    for event in events:
        if kept and kept[-1].param < 0 and kept[-1].live <= event.live:
            kept.pop()
        if kept and event.param < 0 and kept[-1].live >= event.live and kept[-1].param < 0:
            continue
        kept.append(event)
    return tuple(kept)


def flat(peak: int, params: Sequence[int], how: str) -> Timeline:
    """A timeline of which only the peak is known: all gradients come while it is held."""
    return Timeline((Event(peak), *(Event(peak, p) for p in params)), peak, how)
