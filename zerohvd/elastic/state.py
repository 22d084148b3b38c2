"""The state of a training that may lose ranks: what users commit, and what they get back."""

from __future__ import annotations

import functools
import logging
import os
import socket
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from zerohvd.checkpoint.session import Training
from zerohvd.communication.collectives import Collectives
from zerohvd.communication.rendezvous import Call
from zerohvd.elastic import reset
from zerohvd.elastic.copies import Copies, LostStateError
from zerohvd.elastic.rejoin import is_elastic
from zerohvd.launchers import detect

JOB_VARIABLE = "ZEROHVD_ELASTIC"
"""The folder of the job's copies: `zerohvd run` sets it."""

_log = logging.getLogger("zerohvd")
T = TypeVar("T")


class ElasticState:
    """Values that are committed together with a training.

    Args:
        training: Gives the model and its optimizer as checkpoints see them.
        sampler: Has state_dict() and load_state_dict(), and is committed too.
        restore_checkpoint: Loads the newest checkpoint on disk and returns its `extra`, None where
            there is none.
        values: First values of the attributes: an epoch, a number of steps.
        listen: Lets Horovod's elastic launcher tell somebody of hosts that come and go.
    """

    def __init__(
        self,
        training: Callable[[], Training],
        sampler: Any,
        restore_checkpoint: Callable[[], Any] | None,
        values: Mapping[str, Any],
        listen: Callable[[reset.Notices], None],
    ) -> None:
        for name in values:
            if hasattr(type(self), name) or name.startswith("_") or name == "sampler":
                raise ValueError(f"a value of the state cannot be called {name!r}: take another")
        for method in () if sampler is None else ("state_dict", "load_state_dict"):
            if not hasattr(sampler, method):
                raise TypeError(
                    f"sampler must have state_dict() and load_state_dict(), as "
                    f"zero.DistributedSampler has; {type(sampler).__name__} has not"
                )
        self._values = dict(values)
        self._training, self._sampler = training, sampler
        self._restore_checkpoint = restore_checkpoint
        self._copies: Copies | None = None
        self._asked = False
        self._listen, self._notices = listen, reset.Notices()

    def __getattr__(self, name: str) -> Any:
        # Of underscored names nothing is looked up: before __init__ there are no values.
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"the state has no value {name!r}")
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        elif name in self._values:
            self._values[name] = value
        else:
            raise AttributeError(
                f"the state has no value {name!r}, and would not commit it: give its first value "
                f"where the state is made, as in {type(self).__name__}(..., {name}=...)"
            )

    def values(self) -> dict[str, Any]:
        """What is committed beside model and optimizer: also the `extra` of checkpoints on disk."""
        found = dict(self._values)
        if self._sampler is not None:
            found["sampler"] = self._sampler.state_dict()
        return found

    def _take(self, stored: Any) -> None:
        if not isinstance(stored, Mapping):
            raise ValueError(
                "the checkpoint holds no values of the state: save it with extra=state.values()"
            )
        if self._sampler is not None and "sampler" in stored:
            self._sampler.load_state_dict(stored["sampler"])
        self._values.update((name, stored[name]) for name in self._values if name in stored)

    def commit(self) -> None:
        """Keep everything as it is now, in memory; all ranks must call it.

        If ranks are lost, training goes on from the last commit: whatever was done since is
        repeated. Without `zerohvd run` there is nobody to start again, and nothing is kept.
        """
        training = self._training()
        if not self._asked:
            self._find(training.meet(Call.COMMIT))
        if self._copies is not None:
            _take_turn(self, first=_owner() is None)
            self._copies.commit(training, self.values())
            if is_elastic(os.environ):
                self._make_room(training.meet(Call.COMMIT))

    def _make_room(self, ranks: Collectives) -> None:
        """Where hosts have come or are about to go: start again, from what was just committed.

        Horovod tells one rank only, and lets it speak for all; here any rank's word counts.
        """
        told = ranks.allgather_object(self._notices.came, name="zero/elastic/hosts_changed")
        if any(told):
            reset.start_again()

    def restore(self) -> None:
        """Take over the newest commit, if this job has been started again; all ranks must call it.

        Where no commit is left, the newest checkpoint on disk is loaded, if the state was given a
        CheckpointManager.

        Raises:
            LostStateError: There were commits, but each has lost a shard, and there is no
                checkpoint.
        """
        training = self._training()
        ranks = training.meet(Call.RESTORE)
        self._find(ranks)
        _take_turn(self, first=True)
        lost: LostStateError | None = None
        found = None
        try:
            if self._copies is not None:
                found = self._copies.restore(training, ranks)
        except LostStateError as error:
            lost = error
        if found is not None:
            self._take(found[0])
            return
        stored = None if self._restore_checkpoint is None else self._restore_checkpoint()
        if stored is not None:
            self._take(stored)
        elif lost is not None:
            raise lost

    def finish(self) -> None:
        """Training has come to its end: commit it, so that a later failure repeats none of it."""
        self.commit()
        if self._copies is not None:
            self._copies.finish()

    def tells_of_a_loss(self, error: Exception) -> bool:
        """Whether an error means that other ranks are gone, not that this one made a mistake."""
        return reset.tells_of_a_loss(error)

    def _find(self, ranks: Collectives) -> None:
        """Find out where copies are kept; all ranks together."""
        folders = ranks.allgather_object(os.environ.get(JOB_VARIABLE), name="zero/elastic/job")
        self._asked = True
        for rank, folder in enumerate(folders):
            if folder != folders[0]:
                raise ValueError(
                    f"{JOB_VARIABLE} is {folders[0]!r} on rank 0, but {folder!r} on rank {rank}: "
                    f"all ranks need what `zerohvd run` has set. Open MPI: mpirun -x {JOB_VARIABLE}"
                )
        world = detect(os.environ).size
        if folders[0] is not None and world not in (None, ranks.size):
            raise ValueError(
                f"zero.elastic keeps what all ranks train together, but the optimizer's process "
                f"set has {ranks.size} of {world} ranks"
            )
        if is_elastic(os.environ):
            if folders[0] is None:
                raise RuntimeError(
                    "a job of Horovod's elastic launcher needs a place for its copies: start it "
                    "by: zerohvd run -- horovodrun --min-np ... python ..."
                )
            self._listen(self._notices)
        if folders[0] is not None:
            # The launcher's name for this host, where it has one: several may be one machine.
            host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
            self._copies = Copies(Path(folders[0]), host)
        elif ranks.rank == 0:
            _log.warning(
                "zero.elastic: nobody would start this job again, so commits keep nothing. Start "
                "it by: zerohvd run --restarts 5 -- mpirun -np ... python ..."
            )


# The state that commits in this process. Two of them would remove each other's commits.
_turn: list[weakref.ref[ElasticState]] = []


def _owner() -> ElasticState | None:
    return _turn[-1]() if _turn else None


def _take_turn(state: ElasticState, *, first: bool) -> None:
    """Let one state commit: the one that was restored last; `first`: this one from now on."""
    if first:
        _turn[:] = [weakref.ref(state)]
    elif _owner() is not state:
        raise RuntimeError(
            "two states of zero.elastic in one job would remove each other's commits: put the "
            "models into one torch.nn.Module or keras.Model, and use one optimizer and one state"
        )


def run(function: Callable[..., T]) -> Callable[..., T]:
    """Let a function, whose first argument is the state, go on from the last commit.

        @zero.elastic.run
        def train(state):
            while state.step < steps:
                ...
                opt.step()
                state.step += 1
                if state.step % 10 == 0:
                    state.commit()

    In a job that `zerohvd run` has started again, the state is that of the last commit when the
    function begins. All ranks call it. Under Horovod's elastic launcher, a rank that hears of the
    loss of another runs its script again from the beginning, in the same place.
    """

    @functools.wraps(function)
    def wrapper(state: ElasticState, *args: Any, **kwargs: Any) -> T:
        if not isinstance(state, ElasticState):
            raise TypeError(
                f"{function.__name__}() is decorated by zero.elastic.run: its first argument must "
                f"be a state of zero.elastic, got {type(state).__name__}"
            )
        try:
            state.restore()
            result = function(state, *args, **kwargs)
            state.finish()
        except Exception as error:
            if is_elastic(os.environ) and state.tells_of_a_loss(error):
                _log.warning("zero.elastic: starts again, as a rank was lost: %s", error)
                reset.start_again()
            raise
        return result

    return wrapper
