"""Rendezvous: ranks compare what each is about to do before they do it together.

A rank that calls `state_dict()` while another one trains would wait for it for ever, each in a
collective of its own. So whatever ranks do together begins with one small collective under one
name. Ranks that make different calls meet in it and find out.
"""

from __future__ import annotations

import enum
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from zerohvd import limits
from zerohvd.communication.collectives import Array, AsyncCollectives, Handle
from zerohvd.ending import free_the_end
from zerohvd.errors import DisagreementError

# Seconds to wait for the details of a disagreement. The rank that made the other call may come to
# its own check late, or fail before; the error must not depend on it.
DETAILS_PATIENCE = 20.0
_POLL = 1e-3
# Seconds. The last is longer than the patience before a wait serves other ranks.
_TURNS = (0.01, 0.05, 0.5)


class Call(enum.IntEnum):
    """What ranks do together."""

    STEP = 1
    STATE = 2
    GROUP = 3
    SAVE = 4
    LOAD = 5
    FIT = 6
    FIT_COUNTED = 7
    JOIN = 8
    NORM = 9
    GATHERED = 10
    EPOCH = 11
    EVALUATE = 12
    PREDICT = 13
    COMMIT = 14
    RESTORE = 15

    @property
    def said(self) -> str:
        """The call in the user's words."""
        return _SAID[self]


_SAID = {
    Call.STEP: "backward() or step()",
    Call.STATE: "state_dict()",
    Call.GROUP: "add_param_group()",
    Call.SAVE: "zero.save()",
    Call.LOAD: "zero.load()",
    Call.FIT: "model.fit() on data that counts no samples",
    Call.FIT_COUNTED: "model.fit() on a part from zero.shard_dataset",
    Call.JOIN: "hvd.join()",
    Call.NORM: "grad_norm(), or the norm of a param.grad",
    Call.GATHERED: "zero.gathered()",
    Call.EPOCH: "the end of an epoch of model.fit()",
    Call.EVALUATE: "model.evaluate() at stage 3",
    Call.PREDICT: "model.predict() at stage 3",
    Call.COMMIT: "state.commit()",
    Call.RESTORE: "the beginning of a function of @zero.elastic.run",
}
TOGETHER = "All ranks make these calls together: do not put one behind `if hvd.rank() == 0`"
NO_LEAVING = (
    "No rank can leave early: every step needs its shard. Let it go on without a batch until all "
    "ranks are through: `for batch in zero.even_steps(loader)`, which gives None then, with "
    "zero.weight(0) and opt.step()"
)
SAME_DATA = ", and fit the same kind of data on all of them"
SAME_END = (
    "Give all ranks equally many batches, as zero.shard_dataset does, and stop all of them: a "
    "callback that sets model.stop_training by numbers of its own rank, such as TerminateOnNaN, "
    "does so on one of them alone"
)


def _no_wish() -> int:
    return 0


class Claims(NamedTuple):
    """What one rank says at a rendezvous: numbers that a float64 holds exactly."""

    call: float
    trainable: float  # digest of which parameters require gradients
    weighted: float
    passes: float
    options: float  # digest of what else has to be the same
    monitored: float = 0.0  # steps per record of a Monitor; 0: there is none


class Waits(Protocol):
    """Waits for handles while it serves other ranks; see `zerohvd.communication.waiting`."""

    def wait(self, handles: Sequence[Handle]) -> None: ...

    def wait_for(self, handles: Sequence[Handle], seconds: float) -> bool: ...


class Rendezvous:
    """One small collective at the beginning of whatever the ranks do together."""

    def __init__(
        self, collectives: AsyncCollectives, name: str, waiting: Waits | None = None
    ) -> None:
        """
        Args:
            name: Of the collective; the same on all ranks.
            waiting: Waits in the place of the handles' own wait().
        """
        self._collectives = collectives
        self.name = name
        self._waiting = waiting
        self._open: tuple[Claims, Array, Handle] | None = None
        # What a rank wishes travels along, and the highest wish is heard by all: see `preemption`.
        self.wish: Callable[[], int] = _no_wish
        self._heard = 0

    def open(
        self,
        call: Call,
        trainable: Iterable[bool],
        *,
        weighted: bool = False,
        passes: int = 1,
        options: str = "",
        monitored: int = 0,
    ) -> None:
        """Tell the other ranks; does not wait for them.

        Args:
            call: What this rank is about to do.
            trainable: Per parameter of the model, whether it requires a gradient.
            weighted: Whether this rank gave a weight for the step.
            passes: Backward passes per step.
            options: What else has to be the same, such as learning rates.
            monitored: Steps per record of a Monitor; 0: there is none.
        """
        frozen = "".join("01"[bool(t)] for t in trainable)
        digests = (_digest(frozen), float(weighted), passes, _digest(options))
        claims = Claims(call, *digests, float(monitored))
        # The maximum of a value and of its negative are equal only if all ranks said the same.
        numbers = [*claims, *(-c for c in claims), self.wish()]
        said = self._collectives.from_numpy(np.array(numbers, np.float64))
        handle = self._collectives.allreduce_start(said, "max", name=self.name)
        self._open = (claims, said, handle)

    def check(self) -> None:
        """Wait for the others; raise the same DisagreementError on all ranks if they differ."""
        if self._open is None:
            return
        (claims, said, handle), self._open = self._open, None
        with limits.during(Call(int(claims.call)).said):
            if self._waiting is not None:
                self._waiting.wait([handle])
            handle.wait()
        free_the_end()
        *found, wish = self._collectives.to_numpy(said)
        self._heard = max(self._heard, int(wish))
        highest, lowest = Claims(*found[: len(claims)]), Claims(*(-c for c in found[len(claims) :]))
        if highest == lowest:
            return
        # Every rank sees this, so all of them come here.
        heard = self._hear_all(claims)
        groups = _extremes(lowest, highest) if heard is None else _by_rank(heard)
        raise DisagreementError(_difference(groups, lowest, highest))

    def take_heard(self) -> int:
        """The highest wish of any rank since the last call of this, the same on all ranks that have
        come to the same calls; 0: none."""
        heard, self._heard = self._heard, 0
        return heard

    def come_for(self, call: Call) -> None:
        """Tell the other ranks, unless they have not come yet since this one told them last."""
        if self._open is not None and self._open[0].call == call:
            return
        self.check()  # of a step under way
        self.open(call, ())

    def come_together(self, seconds: float) -> bool:
        """`check`, but not for longer than `seconds`; return whether the ranks have come."""
        if self._open is not None and not self._wait_for(self._open[2], seconds):
            return False
        self.check()
        return True

    def _hear_all(self, claims: Claims) -> list[Claims] | None:
        """What each rank said, in rank order; None if a rank does not come to tell."""
        c = self._collectives
        own = c.from_numpy(np.array(claims, np.float64))
        heard = c.from_numpy(np.zeros(len(claims) * c.size, np.float64))
        lengths = [len(claims)] * c.size
        handle = c.gather_into(heard, own, lengths, name=f"{self.name}/who")
        if not self._wait_for(handle, DETAILS_PATIENCE):
            return None
        handle.wait()
        return [Claims(*row) for row in c.to_numpy(heard).reshape(c.size, -1).tolist()]

    def _wait_for(self, handle: Handle, seconds: float) -> bool:
        if self._waiting is not None:
            return self._waiting.wait_for([handle], seconds)
        deadline = time.monotonic() + seconds
        while not handle.done():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL)
        return True


def come_to_all(
    places: Sequence[Rendezvous],
    call: Call,
    everyone: Handle,
    missed_here: Callable[[], Sequence[Rendezvous]],
) -> None:
    """Return when all ranks have made the same call, which concerns several optimizers; raise on
    all ranks when one of them does something else with any of these.

    Args:
        everyone: Is done when all ranks have come here.
        missed_here: Places that other ranks have and this one has not: an optimizer that is garbage
            may not have been collected yet on other ranks. Called when all have come. Without this
            rank they would wait there for ever, and Horovod ends a job in which somebody does.
    """
    for place in places:
        place.come_for(call)
    left, deadline = list(places), limits.Deadline()
    turns = iter(_TURNS)
    turn = 0.0
    while left and not everyone.done() and not deadline.passed():
        turn = next(turns, turn)
        # In turn: the ranks that do something else may do it with any of them.
        left = [place for place in left if everyone.done() or not place.come_together(turn)]
    everyone.wait()
    missed = missed_here()
    for place in missed:
        place.open(call, ())
    for place in [*left, *missed]:
        place.check()


def different_calls(calls: Sequence[int]) -> DisagreementError | None:
    """The error for ranks that made these calls, in rank order; None if they are the same."""
    if len(set(calls)) <= 1:
        return None
    claims = [Claims(call, 0, 0, 0, 0) for call in calls]
    return DisagreementError(_calls_differ(_by_rank(claims)))


def another_trains(rank: int, call: Call) -> DisagreementError:
    """The error for a rank that made this call while another one trains."""
    if call is Call.EPOCH:
        return DisagreementError(
            f"rank {rank} has ended an epoch of model.fit(), or stopped in it, while another rank "
            f"trains on. {SAME_END}"
        )
    return DisagreementError(
        f"rank {rank} called {call.said} while another rank trains. {TOGETHER}{SAME_DATA}"
    )


def others_called(rank: int) -> DisagreementError:
    """The error for a rank that trains while another one made some other call."""
    return DisagreementError(
        f"rank {rank} trains while another rank called zero.save(), zero.load(), model.fit() or, "
        "at stage 3, model.evaluate() or model.predict(), or has ended its epoch. "
        f"{TOGETHER}{SAME_DATA}. {SAME_END}"
    )


class _Group(NamedTuple):
    who: str
    claims: Claims


Grouping = Callable[[Callable[[Claims], float]], list[_Group]]


def _by_rank(heard: Sequence[Claims]) -> Grouping:
    def groups(key: Callable[[Claims], float]) -> list[_Group]:
        ranks: dict[float, list[int]] = {}
        for rank, claims in enumerate(heard):
            ranks.setdefault(key(claims), []).append(rank)
        return [_Group(_ranks(members), heard[members[0]]) for members in ranks.values()]

    return groups


def _extremes(lowest: Claims, highest: Claims) -> Grouping:
    """Groups without the ranks' numbers: only the lowest and the highest value are known."""
    return lambda key: [_Group("some ranks", lowest), _Group("others", highest)]


def _ranks(members: Sequence[int]) -> str:
    return f"rank {members[0]}" if len(members) == 1 else f"ranks {list(members)}"


def _digest(text: str) -> float:
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))


def _difference(groups: Grouping, lowest: Claims, highest: Claims) -> str:
    """What differs, by whom, and what to do; the most telling difference first."""
    if highest.call != lowest.call:
        return _calls_differ(groups)
    if highest.trainable != lowest.trainable:
        return (
            "not the same parameters require gradients on all ranks "
            f"({_unlike(groups(lambda c: c.trainable))}). Freeze and unfreeze the same "
            "parameters everywhere"
        )
    if highest.weighted != lowest.weighted:
        said = [
            f"{g.who} gave {'a' if g.claims.weighted else 'no'} weight"
            for g in groups(lambda c: c.weighted)
        ]
        return (
            f"{', '.join(said)} for this step. Give one on every rank; a rank without a batch "
            "gives 0"
        )
    if highest.passes != lowest.passes:
        said = [f"{g.claims.passes:g} on {g.who}" for g in groups(lambda c: c.passes)]
        return f"backward_passes_per_step is {', '.join(said)}. Set the same number everywhere"
    if highest.monitored != lowest.monitored:
        said = [_monitor_of(g) for g in groups(lambda c: c.monitored)]
        return (
            f"{', '.join(said)}. Make one on every rank, with the same `every`: do not put it "
            "behind `if hvd.rank() == 0`, it writes on rank 0 alone by itself"
        )
    return (
        "learning rates differ, or not all ranks have loaded the optimizer's state "
        f"({_unlike(groups(lambda c: c.options))}). Set rates and call load_state_dict() on every "
        "rank, with the same values; what only rank 0 has loaded is given to all ranks by "
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0) and "
        "hvd.broadcast_optimizer_state(opt, root_rank=0)"
    )


def _monitor_of(group: _Group) -> str:
    every = group.claims.monitored
    return f"{group.who} has {f'a zero.Monitor(every={every:g})' if every else 'no zero.Monitor'}"


def _calls_differ(groups: Grouping) -> str:
    found = groups(lambda c: c.call)
    calls = [Call(int(g.claims.call)) for g in found]
    said = ", ".join(f"{g.who} {call.said}" for g, call in zip(found, calls, strict=True))
    if Call.JOIN in calls:
        return f"some ranks called something else than others: {said}. {NO_LEAVING}"
    fits = any(call in (Call.FIT, Call.FIT_COUNTED) for call in calls)
    return (
        f"some ranks called something else than others: {said}. "
        f"{TOGETHER}{SAME_DATA if fits else ''}"
    )


def _unlike(found: Sequence[_Group]) -> str:
    return " unlike ".join(g.who for g in found)
