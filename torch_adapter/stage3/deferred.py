"""Building a model without its memory: `with zero.deferred_init():`.

Inside, large tensors live on the meta device. What is done to them is written down, and done when
`zeroify` asks for one parameter after the other. Random operations take their numbers from the
generator at once, into scratch memory that is thrown away, and remember where the generator stood:
so everything that follows draws what it would have drawn, and the parameter gets its own numbers
later, whenever that is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from zerohvd.stage3.history import History, Operation
from zerohvd.torch import compat
from zerohvd.torch.compat import TorchDispatchMode, tree_iter, tree_map

# Smaller tensors are real: they cost nothing, and code may look at their values.
REAL_BELOW = 4096

_aten = torch.ops.aten
_EMPTY = (_aten.empty.memory_format, _aten.empty_strided.default)
_READS_VALUES = (
    compat.ITEM,
    _aten.equal.default,
    _aten.is_nonzero.default,
)
# They write every element of their first argument and read none of it.
_REPLACE = {
    "fill_", "zero_", "copy_", "uniform_", "normal_", "bernoulli_", "exponential_", "random_",
    "log_normal_", "cauchy_",
}


class _Call(NamedTuple):
    """One operation that has been recorded."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor]  # those with memory of their own
    random: torch.Tensor | None  # the generator's state before it


class _Place(NamedTuple):
    """Where some memory is in reality."""

    storage: torch.UntypedStorage
    start: int  # bytes


class Tape:
    """What has been done to tensors without memory.

    Views need not be recorded: a view knows which memory it is of, and where it lies in it.
    Tensors are kept alive, or another one could get the identity of their memory.
    """

    def __init__(self) -> None:
        self.history: History[_Call] = History()
        self._alive: dict[torch.UntypedStorage, torch.Tensor] = {}

    def allocate(self, tensor: torch.Tensor) -> None:
        self._alive.setdefault(_memory(tensor), _alias(tensor))

    def holds(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_meta and _memory(value) in self._alive

    def realise(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """The values of `tensor`: does what led to them, and nothing else.

        Args:
            into: Memory for them, where they lie one behind the other.
        """
        made: dict[torch.UntypedStorage, _Place] = {}
        if into is not None and _fills_its_memory(tensor):
            start = int(into.storage_offset()) * into.element_size()
            made[_memory(tensor)] = _Place(into.untyped_storage(), start)
        with torch.no_grad():
            for call in self.history.behind(_memory(tensor)):
                self._redo(call, made)
            return _real(tensor, made)

    def _redo(self, call: _Call, made: dict[torch.UntypedStorage, _Place]) -> None:
        def real(value: Any) -> Any:
            return _real(value, made) if self.holds(value) else value

        args, kwargs = tree_map(real, call.args), tree_map(real, call.kwargs)
        if call.random is None:
            outputs = call.func(*args, **kwargs)
        else:
            generator = _generator(call.kwargs)
            now = generator.get_state()
            generator.set_state(call.random)
            outputs = call.func(*args, **kwargs)
            generator.set_state(now)
        found = [t for t in tree_iter(outputs) if isinstance(t, torch.Tensor)]
        for meta, value in zip(call.outputs, found, strict=False):
            if _memory(meta) in made:
                _real(meta, made).copy_(value)
            else:
                made[_memory(meta)] = _Place(_laid_out_as(meta, value).untyped_storage(), 0)


def _real(meta: torch.Tensor, made: dict[torch.UntypedStorage, _Place]) -> torch.Tensor:
    """The tensor in real memory that `meta` stands for."""
    memory = _memory(meta)
    if memory not in made:
        made[memory] = _Place(torch.UntypedStorage(meta.untyped_storage().nbytes()), 0)
    storage, start = made[memory]
    view = torch.empty(0, dtype=meta.dtype, device="cpu")
    offset = start // view.element_size() + meta.storage_offset()
    return view.set_(storage, offset, meta.size(), meta.stride())


def _fills_its_memory(meta: torch.Tensor) -> bool:
    return meta.is_contiguous() and meta.numel() * meta.element_size() == (
        meta.untyped_storage().nbytes()
    )


def _laid_out_as(meta: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if value.stride() == meta.stride() and value.storage_offset() == meta.storage_offset():
        return value
    size, stride = meta.size(), meta.stride()
    return torch.empty_strided(size, stride, dtype=meta.dtype, device="cpu").copy_(value)


class _Recorder(TorchDispatchMode):
    """Writes down what happens to large tensors, and lets small ones be."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        self._scratch = torch.UntypedStorage(0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with compat.without_torch_function_modes():
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not any(self._tape.holds(t) for t in tensors):
            if tensors or not _makes_large(func, args, kwargs):
                return func(*args, **kwargs)
            return self._record(func, args, kwargs)
        if func in _READS_VALUES or any(not t.is_meta for t in _written(func, args, kwargs)):
            return func(*tree_map(self._real, args), **tree_map(self._real, kwargs))
        return self._record(func, args, kwargs)

    def _real(self, value: Any) -> Any:
        return self._tape.realise(value) if self._tape.holds(value) else value

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        random = torch.Tag.nondeterministic_seeded in func.tags
        before = _generator(kwargs).get_state() if random else None
        on_meta = dict(kwargs)
        if "device" in on_meta:
            on_meta["device"] = torch.device("meta")
        reads = frozenset(_memory(t) for t in tree_iter((args, kwargs)) if self._tape.holds(t))
        outputs = func(*tree_map(_meta, args), **tree_map(_meta, on_meta))
        new = [t for t in tree_iter(outputs) if isinstance(t, torch.Tensor)]
        written = frozenset(_memory(t) for t in _written(func, args, kwargs))
        made = [t for t in new if _memory(t) not in reads]
        for tensor in made:
            self._tape.allocate(tensor)
        if func not in _EMPTY and (made or written):
            held = tree_map(_kept, args), tree_map(_kept, _on_host(kwargs))
            call = _Call(func, *held, [_alias(t) for t in made], before)
            new_memory = frozenset(_memory(t) for t in made)
            replaced = new_memory | _replaced(call)
            self._tape.history.add(Operation(call, reads, written | new_memory, replaced))
        if random:
            self._draw(func, args, kwargs)
        return outputs

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let the generator go on as if the numbers had been used."""
        taken = False

        # One buffer for all: blocks that come and go between the tape's entries fragment the heap.
        def scratch(value: Any) -> Any:
            nonlocal taken
            if not isinstance(value, torch.Tensor) or not value.is_meta:
                return value
            nbytes = value.untyped_storage().nbytes()
            if taken or nbytes == 0:
                return torch.empty_like(value, device="cpu")
            taken = True
            if self._scratch.nbytes() < nbytes:
                self._scratch = torch.UntypedStorage(nbytes)
            real = torch.empty(0, dtype=value.dtype, device="cpu")
            return real.set_(self._scratch, value.storage_offset(), value.size(), value.stride())

        func(*tree_map(scratch, args), **tree_map(scratch, _on_host(kwargs)))


class _Disguise(TorchFunctionMode):
    """Deferred tensors say that they are on the host: torch.nn.init leaves others alone."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        told = _TOLD.get(func)
        if told is not None:
            with compat.without_torch_function_modes():
                if self._tape.holds(args[0]):
                    return told
        return func(*args, **(kwargs or {}))


_TOLD = {
    getattr(torch.Tensor, attribute).__get__: told
    for attribute, told in {"is_meta": False, "is_cpu": True, "device": torch.device("cpu")}.items()
}


# Who holds a deferred tensor cannot be asked: a model may be copied, or taken apart. Tapes stay.
_tapes: list[Tape] = []


class deferred_init:
    """Build a model inside, and its large tensors take no memory until `zeroify(stage=3)`.

        torch.manual_seed(0)
        with zero.deferred_init():
            model = GPT(...)
        opt = torch.optim.AdamW(model.parameters())
        model, opt = zero.zeroify(model, opt, stage=3)

    `zeroify` gives the parameters the values they would have had, one unit at a time: whatever the
    modules' own initialisation does, with the same numbers from the same seed. The first rank does
    it for all. To start from saved values, call `model.load_state_dict()` after `zeroify`.
    """

    def __enter__(self) -> None:
        tape = Tape()
        _tapes.append(tape)
        self._recorder, self._disguise = _Recorder(tape), _Disguise(tape)
        self._recorder.__enter__()
        self._disguise.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._disguise.__exit__(*error)
        self._recorder.__exit__(*error)
        del self._recorder, self._disguise  # and the scratch memory


def is_deferred(tensor: torch.Tensor) -> bool:
    return tensor.is_meta and any(tape.holds(tensor) for tape in _tapes)


def _values(tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    return next(tape for tape in _tapes if tape.holds(tensor)).realise(tensor, into)


def fill_deferred(param: torch.Tensor, into: torch.Tensor) -> None:
    """Write the first values of a parameter, real or deferred, into memory."""
    with torch.no_grad():
        values = _values(param, into) if is_deferred(param) else param.data
        if values.data_ptr() != into.data_ptr():
            into.copy_(values)


def materialise(model: torch.nn.Module, params: Iterable[torch.nn.Parameter]) -> None:
    """Give the model's deferred buffers and these parameters their values."""
    for param in params:
        if is_deferred(param):
            embody(param, _values(param))
    done: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for key, value in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if is_deferred(value):
                if value not in done:
                    done[value] = _values(value)
                setattr(module, key, done[value])


def embody(param: torch.nn.Parameter, data: torch.Tensor) -> None:
    """Let a parameter without memory have `data`. It stays the object that an optimizer knows."""
    made = torch.nn.Parameter(data, requires_grad=param.requires_grad)
    compat.swap_tensors(param, made)


# -- small things ----------------------------------------------------------------------------------


def _memory(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The identity of the memory behind a tensor: equal for all views of it."""
    return tensor.untyped_storage()


def _generator(kwargs: dict[str, Any]) -> torch.Generator:
    given = kwargs.get("generator")
    return torch.default_generator if given is None else given


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Values are made on the host, and go where they belong when they are wanted."""
    return {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs


def _makes_large(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is None or torch.device(device).type == "meta":
        return False
    try:
        made = func(*args, **{**kwargs, "device": torch.device("meta")})
    except (NotImplementedError, RuntimeError):
        return False  # what has no meaning without memory has some
    return isinstance(made, torch.Tensor) and made.numel() >= REAL_BELOW


def _meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) and not value.is_meta else value


def _kept(value: Any) -> Any:
    """Small real tensors may change later: the tape needs them as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return _alias(value) if value.is_meta else value.clone()


def _alias(meta: torch.Tensor) -> torch.Tensor:
    """The same memory under another object: a parameter can be swapped only if it is free."""
    made = torch.empty(0, dtype=meta.dtype, device="meta")
    return made.set_(meta.untyped_storage(), meta.storage_offset(), meta.size(), meta.stride())


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that the operation writes into."""
    arguments = compat.operator_arguments(func)
    values = dict(zip((name for name, _ in arguments), args, strict=False)) | kwargs
    names = [name for name, is_written in arguments if is_written]
    return [values[n] for n in names if isinstance(values.get(n), torch.Tensor)]


def _replaced(call: _Call) -> frozenset[torch.UntypedStorage]:
    """The memory, if any, of which every element is written and none is read."""
    if compat.operator_name(call.func) not in _REPLACE:
        return frozenset()
    target = call.args[0]
    whole = target.numel() * target.element_size() == target.untyped_storage().nbytes()
    return frozenset({_memory(target)} if whole else ())
