"""From a checkpoint, or a plain file of weights, into a model and its optimizer.

Everything is read, and checked as it passes, into arrays beside the model. When all ranks have done
so without complaint, they are assigned and given back one after the other. So no byte is read twice
and nothing is ever half-loaded, for memory as large as this rank's shards while it lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from zerohvd.checkpoint import TensorInfo, Want
from zerohvd.checkpoint.loading import OWN, refuse_names
from zerohvd.keras.checkpoint.holdings import Holdings
from zerohvd.keras.checkpoint.storing import BUFFER, LOCAL, MASTER, PARAM, STATE, SUMS, own_name
from zerohvd.keras.optimizer import state
from zerohvd.keras.params.pieces import PieceVariable
from zerohvd.layout import Bucket, Span


class _Item:
    """A range to read, and who takes it.

    Args:
        parts: Added up, each times a factor; none: zeros.
        span: Of each.
        take: Gets a flat array.
    """

    def __init__(
        self,
        parts: Sequence[tuple[TensorInfo, float]],
        span: Span,
        take: Callable[[np.ndarray], None],
    ) -> None:
        self._take = take
        dtype = tf.as_dtype(parts[0][0].dtype).as_numpy_dtype if parts else np.float32
        simple = len(parts) == 1 and parts[0][1] == 1.0
        self._data = (np.empty if simple else np.zeros)(span.length, dtype)
        whole = self._data.view(np.uint8).data
        self.wants = [
            Want(info.key, span, whole if simple else self._add(info, factor))
            for info, factor in parts
        ]

    def _add(self, info: TensorInfo, factor: float) -> Callable[[int, memoryview], None]:
        dtype = np.dtype(tf.as_dtype(info.dtype).as_numpy_dtype)

        def add(start: int, block: memoryview) -> None:
            values = np.frombuffer(block, dtype)
            self._data[start : start + values.size] += values * np.asarray(factor, dtype)

        return add

    def apply(self) -> None:
        """Hand over what has been read."""
        self.wants.clear()
        data, self._data = self._data, np.empty(0)
        self._take(data)


class Plan:
    """What to read, and where it goes.

    Args:
        held: Of the model.
        tensors: What there is to read.
        stored_places: Name in the checkpoint -> place in a .weights.h5 file: models are matched
            by these, for layer names may be numbered differently.
        unplaced: Names in the checkpoint of what has no such place: matched in their order.
        rank, size: Of this job.
        saved_size: Number of ranks that saved; 0: a plain file.
        strict: Whether names must match exactly.
    """

    def __init__(
        self,
        held: Holdings,
        tensors: Mapping[str, TensorInfo],
        stored_places: Mapping[str, str],
        unplaced: Sequence[str],
        *,
        rank: int,
        size: int,
        saved_size: int,
        strict: bool,
    ) -> None:
        self.held, self.tensors = held, tensors
        self.rank, self.size, self.saved_size = rank, size, saved_size
        self._stored = self._match(stored_places, unplaced)
        self._check_names(strict)
        self.buckets: dict[int, list[_Item]] = {}
        self.items: list[_Item] = []
        self._scalars: list[tuple[Any, Any]] = []

    def _match(self, stored_places: Mapping[str, str], unplaced: Sequence[str]) -> dict[str, str]:
        """Name in the model -> name in the checkpoint."""
        at = {place: name for name, place in stored_places.items()}
        found = {name: name for name in self.held.variables}
        found.update({name: at.get(place, name) for name, place in self.held.places.items()})
        if len(unplaced) == len(self.held.unplaced):
            found.update(zip(self.held.unplaced, unplaced, strict=True))
        return found

    def _check_names(self, strict: bool) -> None:
        stored = {t.name for t in self.tensors.values() if t.kind in (PARAM, BUFFER)}
        wanted = {self._stored[n]: n for n in self.held.variables}
        missing = sorted(n for s, n in wanted.items() if s not in stored)
        unknown = sorted(stored - set(wanted))
        if not self.saved_size:
            # Plain files need not know the seeds of dropout layers.
            seeds = set(self.held.others) - self.held.trainable_others
            missing = [n for n in missing if n not in seeds]
        if strict:
            refuse_names(missing, unknown)

    def _find(self, kind: str, name: str, shape: Any = None) -> TensorInfo | None:
        info = self.tensors.get(f"{kind}/{self._stored[name]}")
        if info is not None and shape is not None and info.shape != tuple(shape):
            raise ValueError(
                f"{name!r} has shape {info.shape} in the checkpoint, but {tuple(shape)} in the "
                "model"
            )
        return info

    @property
    def wants(self) -> list[Want]:
        items = (*self.items, *(i for items in self.buckets.values() for i in items))
        return [want for item in items for want in item.wants]

    # -- the model --------------------------------------------------------------------------------

    def weights(self) -> None:
        if self.held.optimizer is not None:
            for piece in self.held.optimizer.step.pieces:
                self._piece(piece)
        for name, variable in self.held.others.items():
            info = self._other(name, variable)
            if info is not None:
                numel = int(np.prod(variable.shape, dtype=np.int64))
                self.items.append(_Item([(info, 1.0)], Span(0, numel), _assign(variable)))

    def _other(self, name: str, variable: tf.Variable) -> TensorInfo | None:
        if self.size == self.saved_size:
            own = self.tensors.get(f"{OWN}/{own_name(self._stored[name], self.rank)}")
            if own is not None and own.shape == tuple(variable.shape):
                return own
        return self._find(PARAM, name, variable.shape) or self._find(BUFFER, name, variable.shape)

    def _piece(self, piece: PieceVariable) -> None:
        name = piece.spec.name
        info = self._find(PARAM, name, piece.spec.shape)
        master = self._find(MASTER, name, piece.spec.shape)
        wide = piece.master is not None or (info is not None and info.dtype != piece.spec.dtype)
        info = master if master is not None and wide else info
        if info is None:
            return

        def take(flat: np.ndarray) -> None:
            value = tf.cast(flat.reshape(piece.shape), piece.dtype)
            piece.assign(value)
            if piece.master is not None:
                piece.master.assign(value)

        item = _Item([(info, 1.0)], Span(*piece.piece.param_span), take)
        self.buckets.setdefault(piece.piece.bucket, []).append(item)

    # -- the optimizer ----------------------------------------------------------------------------

    def optimizer(self, scalars: Mapping[str, Any], kind: str) -> None:
        """Slots, accumulated gradients, and what all ranks hold alike."""
        inner = self.held.optimizer.inner_optimizer
        for slot in state.slots(self.held.optimizer):
            attribute = slot.kind
            if attribute == "master":
                continue
            info = self._find(f"{STATE}{attribute}", slot.piece.spec.name)
            if info is not None:
                self._slot(slot, info)
            elif attribute == SUMS:
                self._sums_from_local(slot)
            else:
                raise ValueError(
                    f"the checkpoint holds no {attribute} of {slot.piece.spec.name!r}: it was "
                    f"saved with {kind}, this is {type(inner).__name__}"
                )
        self._local_sums()
        known = self.held.scalars
        missing = sorted(n for n in known if n not in scalars and n != "_learning_rate")
        if missing:
            raise ValueError(
                f"the checkpoint lacks {missing[0]!r} of the optimizer: it was saved with {kind}, "
                f"this is {type(inner).__name__}"
            )
        self._scalars = [(known[n], value) for n, value in scalars.items() if n in known]

    def _slot(self, slot: Any, info: TensorInfo) -> None:
        piece = slot.piece
        elementwise = info.shape == tuple(piece.spec.shape)
        if not elementwise and (not piece.whole or info.shape != tuple(slot.variable.shape)):
            raise ValueError(
                f"{info.key!r} has shape {info.shape} in the checkpoint, which does not fit "
                f"{piece.path!r} of shape {piece.spec.shape}"
            )
        span = Span(*piece.piece.param_span) if elementwise else Span(0, info.numel)
        self.items.append(_Item([(info, 1.0)], span, _assign(slot.variable)))

    def _locals(self, name: str, ranks: Any) -> list[TensorInfo]:
        keys = [f"{LOCAL}/{own_name(self._stored[name], r)}" for r in ranks]
        return [self.tensors[k] for k in keys if k in self.tensors]

    def _sums_from_local(self, slot: Any) -> None:
        """Stage 2 from a lower stage: the mean of what the ranks had added up each by itself."""
        found = self._locals(slot.piece.spec.name, range(self.saved_size))
        if found:
            parts = [(info, 1.0 / self.saved_size) for info in found]
            span = Span(*slot.piece.piece.param_span)
            self.items.append(_Item(parts, span, _assign(slot.variable)))

    def _local_sums(self) -> None:
        """Stages 0 and 1: each rank its own sums; those of ranks that are no more go to others."""
        step = self.held.optimizer.step
        mine = [r for r in range(self.saved_size) if r % self.size == self.rank]
        for index, total in enumerate(step.local_sums):
            name = step.layout.params[index].name
            whole = Span(0, step.layout.params[index].numel)
            found = self._locals(name, mine)
            scale = self.size / self.saved_size
            if found or self._locals(name, range(self.saved_size)):
                self.items.append(_Item([(i, scale) for i in found], whole, _assign(total)))
                continue
            reduced = self._find(f"{STATE}{SUMS}", name)
            if reduced is not None:
                # The mean over the ranks is what it was if each brings it along.
                self.items.append(_Item([(reduced, 1.0)], whole, _assign(total)))

    # -- doing it ---------------------------------------------------------------------------------

    def apply(self) -> None:
        """Put everything into place; all ranks must call it."""
        for item in self.items:
            item.apply()
        if self.held.optimizer is not None:
            step = self.held.optimizer.step

            def prepare(bucket: Bucket) -> None:
                for piece in step.pieces_in(bucket):
                    piece.load()  # what the checkpoint lacks stays as it is
                for item in self.buckets.get(bucket.index, ()):
                    item.apply()

            step.wire.new_traffic()
            step.assign_all(prepare)
        for variable, value in self._scalars:
            variable.assign(value)


def _assign(variable: Any) -> Callable[[np.ndarray], None]:
    def take(flat: np.ndarray) -> None:
        variable.assign(tf.cast(flat.reshape(variable.shape), variable.dtype))

    return take
