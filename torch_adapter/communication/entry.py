"""Before ranks work together, they compare what each is about to do."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch

from zerohvd.errors import DisagreementError
from zerohvd.torch.communication.collectives import Handle, LocalCollectives, TorchCollectives

STEP, STATE, GROUP, SAVE, LOAD = 1, 2, 3, 4, 5
_DOINGS = {
    STEP: "backward() or step()",
    STATE: "state_dict()",
    GROUP: "add_param_group()",
    SAVE: "zero.save()",
    LOAD: "zero.load()",
}


class Entry:
    """One small collective, under one name, at the beginning of whatever the ranks do together.

    Ranks that do different things meet in it and find out, instead of waiting for each other in
    different collectives for ever.
    """

    def __init__(
        self,
        collectives: TorchCollectives | LocalCollectives,
        name: str,
        wait: Callable[[Sequence[Handle]], None] | None = None,
    ) -> None:
        """
        Args:
            wait: Waits for handles in the place of their own wait().
        """
        self._collectives = collectives
        self._name = name
        self._wait = wait
        self._open: tuple[torch.Tensor, Handle] | None = None

    def open(
        self,
        doing: int,
        params: Iterable[torch.nn.Parameter],
        *,
        weighted: bool = False,
        passes: int = 1,
        options: str = "",
    ) -> None:
        """Tell the others; does not wait for them.

        Args:
            doing: STEP, STATE, GROUP, SAVE or LOAD.
            params: The model's parameters; which of them are frozen is compared.
            weighted: Whether this rank gave a weight for the step.
            passes: Backward passes per step.
            options: What else has to be the same, such as learning rates.
        """
        trainable = "".join("01"[p.requires_grad] for p in params)
        claims = [float(doing), _number(trainable), float(weighted), passes, _number(options)]
        # The maximum of a value and of its negative: equal only if all ranks said the same.
        said = torch.tensor(claims + [-c for c in claims], dtype=torch.float64)
        self._open = (said, self._collectives.allreduce_start(said, "max", name=self._name))

    def check(self) -> None:
        """Wait for the others, and raise on all ranks if they differ."""
        if self._open is None:
            return
        (said, handle), self._open = self._open, None
        if self._wait is not None:
            self._wait([handle])
        handle.wait()
        half = len(said) // 2
        highest, lowest = said[:half].tolist(), (-said[half:]).tolist()
        if highest != lowest:
            raise DisagreementError(
                f"rank {self._collectives.rank}: {_difference(lowest, highest)}."
            )


def _number(text: str) -> float:
    """A digest that a float64 holds exactly."""
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))


def _difference(lowest: list[float], highest: list[float]) -> str:
    if highest[0] != lowest[0]:
        return (
            f"some ranks called {_DOINGS[int(lowest[0])]} while others called "
            f"{_DOINGS[int(highest[0])]}. All ranks make these calls together: do not put one "
            "behind `if hvd.rank() == 0`"
        )
    if highest[1] != lowest[1]:
        return (
            "not the same parameters require gradients on all ranks. Freeze and unfreeze the "
            "same parameters everywhere"
        )
    if highest[2] != lowest[2]:
        return (
            "some ranks gave a weight for this step and others did not. Give one on every rank; "
            "a rank without a batch gives 0"
        )
    if highest[3] == lowest[3]:
        return (
            "learning rates differ, or not all ranks have loaded the optimizer's state. Set "
            "rates and call load_state_dict() on every rank, with the same values"
        )
    return (
        f"backward_passes_per_step is {lowest[3]:g} on some ranks and {highest[3]:g} on others. "
        "Set the same number everywhere"
    )
