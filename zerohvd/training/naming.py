"""Names of an optimizer's parameters and their bucket groups, for parameters of any framework."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

P = TypeVar("P", bound=Hashable)


def name_params(
    groups: Sequence[Sequence[Any]],
    named_parameters: Iterable[tuple[str, P]] | None,
    *,
    first_group: int = 0,
) -> dict[P, str]:
    """Every parameter of an optimizer once, with its name, in the order of the model.

    Args:
        groups: The parameters of each group, or (name, parameter) pairs.
        named_parameters: Names from the model, for parameters that come without.
        first_group: Number of the first group, for parameters without any name.
    """
    names: dict[P, str] = {}
    for g, group in enumerate(groups, start=first_group):
        for i, entry in enumerate(group):
            name, param = entry if isinstance(entry, tuple) else (f"group{g}.{i}", entry)
            names[param] = name
    if named_parameters is None:
        return names
    given = _check_named(named_parameters)
    missing = [n for p, n in names.items() if p not in given]
    if missing:
        raise ValueError(
            f"named_parameters names {len(given)} parameters, but the optimizer has "
            f"{len(missing)} that are not among them (the first: {missing[0]}). "
            "Pass model.named_parameters() of the whole model."
        )
    # The model's order is that of the forward pass, which optimizer groups may have mixed.
    return {p: n for p, n in given.items() if p in names}


def _check_named(named_parameters: Iterable[tuple[str, P]]) -> dict[P, str]:
    given: dict[P, str] = {}
    seen: set[str] = set()
    for entry in named_parameters:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ValueError(
                "named_parameters must be (name, parameter) pairs, as model.named_parameters() "
                f"gives them; got {type(entry).__name__}"
            )
        name, param = entry
        if name in seen:
            raise ValueError(f"named_parameters has the name {name!r} twice; names must be unique")
        seen.add(name)
        given.setdefault(param, name)  # a tied parameter goes by its first name
    return given


def group_numbers(groups: Any, is_param: Callable[[Any], bool]) -> Mapping[Any, int]:
    """The number of each parameter's bucket group, from 1; parameters in none are not listed.

    Args:
        groups: As Horovod takes them: a number of buckets, lists of parameters, or None.
        is_param: Whether a member of a list is a parameter.
    """
    if groups is None or isinstance(groups, int):
        if isinstance(groups, int) and groups < 0:
            raise ValueError(f"groups must be at least 0, got {groups}")
        return {}
    numbers: dict[Any, int] = {}
    for g, members in enumerate(groups, start=1):
        for member in members:
            if not is_param(member):
                raise ValueError(f"groups must be lists of tensors, got {type(member).__name__}")
            if member in numbers:
                raise ValueError("groups: a parameter is in two groups; it can be in one only")
            numbers[member] = g
    return numbers


def groups_bucket_bytes(groups: Any, total_bytes: int) -> int | None:
    """The bucket size that gives about `groups` buckets; None where that was not asked for."""
    if not isinstance(groups, int) or groups == 0:
        return None
    return max(1, -(-total_bytes // groups))


def unique_names(names: Iterable[str]) -> list[str]:
    """The names, those that have occurred before with a number: "w", "w#2"."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        count = seen[name] = seen.get(name, 0) + 1
        found.append(name if count == 1 else f"{name}#{count}")
    return found
