"""What this rank holds of a model and its optimizer, by parameter name and whatever the stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zerohvd.layout import Layout, Span
from zerohvd.torch.gradients.section import Section
from zerohvd.torch.optimizer.zero_optimizer import ZeroOptimizer
from zerohvd.torch.params.owned import optimizer_of


@dataclasses.dataclass(frozen=True)
class Held:
    """A range of a parameter that this rank is responsible for."""

    name: str
    shape: tuple[int, ...]
    span: Span
    values: torch.Tensor  # 1-D, a view of the parameters' memory
    master: torch.Tensor | None = None  # 1-D, where the optimizer updates another dtype
    piece: torch.nn.Parameter | None = None  # what the inner optimizer knows it by
    section: int = -1
    bucket: int = -1
    place: Span | None = None  # in this rank's shard of the bucket

    @property
    def whole(self) -> bool:
        numel = 1
        for d in self.shape:
            numel *= d
        return self.span == (0, numel)


def owner_of(model: torch.nn.Module) -> ZeroOptimizer | None:
    """The sharded optimizer that holds parameters of this model, if there is one."""
    for param in model.parameters():
        found = optimizer_of(param)
        if found is not None:
            assert isinstance(found, ZeroOptimizer)
            return found
    return None


class Holdings:
    """Everything to store of a model, and where it lies.

    Attributes:
        pieces: This rank's ranges of sharded parameters; of all of them at stage 0.
        replicated: Every rank has the same pieces.
        wholes: Parameters that every rank holds whole, outside any shard.
        buffers: As in the model's state_dict.
        aliases: Further name -> first name, of tied parameters and buffers.
    """

    def __init__(self, model: torch.nn.Module, opt: ZeroOptimizer | None) -> None:
        self.model = getattr(model, "_orig_mod", model)  # torch.compile renames everything
        self.opt = opt
        self.names: dict[torch.Tensor, str] = {}
        self.aliases: dict[str, str] = {}
        self.params: dict[str, torch.nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self._walk()
        self.sections: Sequence[Section] = [] if opt is None else opt.sections
        self.pieces = list(self._pieces())
        self.ranks = 1 if opt is None else opt.collectives.size
        self.replicated = opt is not None and opt.config.stage == 0
        sharded = {p for _, _, params, _ in self._layouts() for p in params}
        self.wholes = {
            n: p for n, p in self.params.items() if p not in sharded or p.numel() == 0
        }

    def _walk(self) -> None:
        for path, module in self.model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for key, param in module._parameters.items():
                if param is not None:
                    self._note(f"{prefix}{key}", param, self.params)
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    self._note(f"{prefix}{key}", buffer, self.buffers)
        if self.opt is not None:
            for param, named in self.opt.named.items():
                if param in self.names:
                    continue
                if named.name in self.params:
                    raise ValueError(
                        f"the optimizer updates a parameter {named.name!r} that is not the model's "
                        "any more: a module was replaced after the optimizer had been made"
                    )
                # Of another module, but in the same optimizer.
                self._note(named.name, param, self.params)

    def _note(self, name: str, tensor: Any, where: dict[str, Any]) -> None:
        first = self.names.setdefault(tensor, name)
        if first == name:
            where[name] = tensor
        else:
            self.aliases[name] = first

    def _layouts(self) -> Iterator[tuple[Layout, Any, list[torch.nn.Parameter], int]]:
        """(layout, shard of a bucket, params, section) of everything that is sharded."""
        for number, section in enumerate(self.sections):
            yield section.layout, section.param_shard, section.params, number
        units = None if self.opt is None else self.opt.units
        for unit in units.all if units is not None else ():
            for part in unit.parts:
                if not any(part is section.flat for section in self.sections):
                    # Frozen parameters of stage 3.
                    params = [self.params[spec.name] for spec in part.layout.params]
                    yield part.layout, part.shards.__getitem__, params, -1

    def _pieces(self) -> Iterator[Held]:
        rank = 0 if self.opt is None else self.opt.collectives.rank
        for layout, shard_of, params, number in self._layouts():
            section = self.sections[number] if number >= 0 else None
            own = rank if layout.size > 1 else 0
            tensors = iter(section.owned) if section is not None else None
            for piece in layout.pieces(own):
                param = params[piece.param]
                start = layout.buckets[piece.bucket].span(own).start
                place = piece.bucket_span.shift(-start)
                master = section.masters[piece.bucket] if section is not None else None
                yield Held(
                    self.names[param],
                    tuple(param.shape),
                    piece.param_span,
                    shard_of(piece.bucket)[place.start : place.stop],
                    None if master is None else master[place.start : place.stop],
                    None if tensors is None else next(tensors).tensor,
                    number,
                    piece.bucket,
                    place,
                )

    def modules_with_extra_state(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for path, module in self.model.named_modules():
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                yield path, module
