"""Ranks with unequal batches: how much each rank's gradient counts in a step."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

NEEDS_AVERAGE = "a weight needs op=hvd.Average: a sum does not weigh ranks"


def check_weight(value: Any) -> float:
    """Return `value` as a float; raise ValueError unless it is a finite number >= 0."""
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(
            f"a weight must be a number >= 0, such as the number of samples in this rank's "
            f"batch; got {value!r}"
        )
    return number


class Announced:
    """The weight announced for the next step; None: all ranks count alike.

    Attributes:
        held: A step that takes the weight does not use it up.
        number: How many weights have been announced so far.
    """

    def __init__(self) -> None:
        self.value: Any = None
        self.number = 0
        self.held = False
        self._may_enter_loss = True
        self._in_loss: set[int] = set()  # ids of the optimizers whose loss contains the weight
        self._listeners: list[weakref.WeakMethod[Callable[[Any], None]]] = []

    def announce(self, value: Any, *, held: bool = False) -> None:
        self.value, self.held = value, held
        self.number += 1
        self._listeners = [listener for listener in self._listeners if listener() is not None]
        for listener in self._listeners:
            call = listener()
            if call is not None:
                call(value)

    def tell(self, listener: Callable[[Any], None]) -> None:
        """Call this method, while its object lives, with every weight that is announced."""
        self._listeners.append(weakref.WeakMethod(listener))

    def take(self) -> Any:
        """Return the weight, and forget it unless it is held."""
        value = self.value
        if not self.held:
            self.value = None
        return value

    def clear(self) -> None:
        """Forget an announced weight."""
        self.value, self.held = None, False
        self._in_loss.clear()

    @contextlib.contextmanager
    def during(self, value: Any, *, in_loss: bool = True) -> Iterator[None]:
        """Announce the weight of all steps of all optimizers inside.

        `in_loss` is whether a loss may be multiplied with it: not where several optimizers may take
        gradients of one loss, and those that did not multiply it would count the weight twice.
        """
        self.announce(value, held=True)
        self._may_enter_loss = in_loss
        try:
            yield
        finally:
            self.clear()

    def holding(
        self, original: Callable[..., Any], in_loss: Callable[..., bool]
    ) -> Callable[..., Any]:
        """Wrap a function so that an announced weight holds inside: a framework that traces steps
        may call one twice. `in_loss` is asked with the function's first argument."""

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if self.value is None:
                return original(*args, **kwargs)
            with self.during(self.value, in_loss=in_loss(args[0])):
                return original(*args, **kwargs)

        return function

    def may_enter_loss(self) -> bool:
        """Whether there is a weight that stays until its `during` ends, and that a loss may be
        multiplied with."""
        return self.held and self.value is not None and self._may_enter_loss

    def put_into_loss(self, optimizer: object) -> None:
        """Note that the optimizer's loss has been multiplied with the weight."""
        self._in_loss.add(id(optimizer))

    def will_be_in_loss(self, optimizer: object) -> bool:
        """As `is_in_loss`, but the question does not count."""
        return id(optimizer) in self._in_loss

    def is_in_loss(self, optimizer: object) -> bool:
        """Whether the gradients to come contain the weight already; asked once per step."""
        found = id(optimizer) in self._in_loss
        self._in_loss.discard(id(optimizer))
        return found


_announced = Announced()


class weight:
    """Say how much this rank counts in the next step, before its backward pass.

    Gradients are averages over the rank's own batch; with the number of its samples as the
    weight, the result equals one process on the union of all samples. A rank without a batch
    gives 0 and skips its backward pass, but not `opt.step()`. Every rank has to give a weight.
    It counts for the next step of each optimizer, whether that step succeeds or not.

        zero.weight(len(batch))                       # for the next opt.step()
        with zero.weight(len(batch)): loss.backward() # the same
    """

    def __init__(self, value: float) -> None:
        self.value = check_weight(value)
        _announced.announce(self.value)

    def __enter__(self) -> weight:
        _announced.announce(self.value)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The step that consumes the gradients still needs it; a failed pass does not.
        if kind is not None:
            clear()

    def __repr__(self) -> str:
        return f"zero.weight({self.value:g})"


tell = _announced.tell


def clear() -> None:
    """Forget an announced weight."""
    _announced.clear()


class StepWeights:
    """The weights of one optimizer's steps: what is announced counts for one step of each.

    Attributes:
        value: Of the step under way; None: all ranks count alike, or no step has begun.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._used = _announced.number  # what was said before this optimizer was made is not for it
        self._begun = False

    @property
    def waits(self) -> bool:
        """Whether a weight has been announced for a step that has not begun."""
        return _announced.value is not None and _announced.number > self._used

    def begin(self) -> float | None:
        """Return the weight of the step under way; the first call takes the announced one."""
        if not self._begun:
            self._begun = True
            self.value = _announced.value if self.waits else None
            self._used = _announced.number
        return self.value

    def give(self, value: float) -> None:
        """Set the weight of this optimizer's step, which has not begun: no other one sees it."""
        self.value, self._begun, self._used = value, True, _announced.number

    def check_unchanged(self) -> None:
        """Raise if another weight has been announced since gradients of this step have left: it
        would be ignored silently."""
        value: float | None = _announced.value
        if value is None or value == self.value:
            self.use_up()  # the same weight once more, for another pass of this step
        if _announced.number == self._used:
            return
        left = "no weight" if self.value is None else f"weight {self.value:g}"
        raise ValueError(
            f"zero.weight({value:g}) came after gradients of this step had left with {left}. Give "
            "one weight per step, before its first backward pass"
        )

    def use_up(self) -> None:
        """What has been announced so far counts for no step to come."""
        self._used = _announced.number

    def end(self) -> None:
        """The step is over, applied or not."""
        self.begin()
        self.value, self._begun = None, False
