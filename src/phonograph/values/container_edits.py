"""What a call does to containers that it is given: found by what they hold before and afterwards, and done again to others."""

from __future__ import annotations

from collections.abc import Container, MutableMapping, Sequence
from typing import Any, NamedTuple

from .._torch.dynamic import Table, Thing
from .._torch.pytree import SUPPORTED_NODES
from .object_layout import Layout, layout_of, parts_of, put_into, replace
from .pytree_nodes import DICTS, is_dataclass, taken_apart

__all__ = ["Edit", "entries"]


def entries(container: Thing, by_attributes: Container[type] = ()) -> dict[tuple[bool, Any], Any] | None:
    """What a container holds, by what it is called: (whether that is an item, its key or name). None if it cannot be set. An
    object of the classes `by_attributes` holds these."""
    kind = type(container)
    if kind in (list, tuple):
        return {(True, i): value for i, value in enumerate(container)} if kind is list else None
    if kind in DICTS:
        return {(True, key): value for key, value in container.items()}
    parts = taken_apart(container) if kind not in by_attributes else None
    if parts is not None and is_dataclass(kind):
        return {(False, name): value for name, value in zip(*parts, strict=True)}
    if parts is not None:
        return _mapped(container, parts[1])
    layout = layout_of(kind)
    if layout is None:
        return None
    names, values, items, _ = parts_of(container, layout)
    return {(False, n): v for n, v in zip(names, values, strict=True)} | {(True, k): v for k, v in (items or {}).items()}


def _mapped(container: Thing, values: list[object]) -> dict[tuple[bool, object], object] | None:
    """What an object of a class that is registered with pytree holds, if it does so under the keys that it has."""
    if not issubclass(type(container), MutableMapping):
        return None
    keys = list(container.keys())
    if len(keys) != len(values) or not all(type(k) is str and container[k] is v for k, v in zip(keys, values, strict=True)):
        return None
    return {(True, key): value for key, value in zip(keys, values, strict=True)}


class Edit(NamedTuple):
    """What a call has done to the container of this number: of `all` the entries that it then has, in this order, these are
    `new`. Objects of some classes hold their attributes (see `entries`)."""

    number: int
    all: tuple[tuple[bool, Any], ...]
    new: tuple[tuple[bool, Any], ...]
    by_attributes: Container[type] = ()

    @classmethod
    def between(
        cls, number: int, before: Table, now: Table, by_attributes: Container[type] = ()
    ) -> Edit | None:  # fmt: skip
        new = tuple([at for at, value in now.items() if at not in before or before[at] is not value])
        return cls(number, tuple(now), new, by_attributes) if new or list(before) != list(now) else None

    def repeat(self, container: Thing, values: Sequence[object]) -> None:
        """Do the same to another container that held the same, with these new values."""
        found, new = entries(container, self.by_attributes) or {}, dict(zip(self.new, values, strict=True))
        now = {at: new[at] if at in new else found[at] for at in self.all}
        items = {key: value for (is_item, key), value in now.items() if is_item}
        attributes = {name: value for (is_item, name), value in now.items() if not is_item}
        kind = type(container)
        if kind is list:
            container[:] = items.values()
        elif kind in DICTS:
            replace(container, items)
        elif kind in SUPPORTED_NODES and kind not in self.by_attributes:
            for _, key in found.keys() - now.keys():
                del container[key]
            for _, key in self.new:
                container[key] = items[key]
        elif is_dataclass(kind):
            for _, name in found.keys() - now.keys():
                object.__delattr__(container, name)
            for _, name in self.new:
                object.__setattr__(container, name, attributes[name])
        else:
            _, _, theirs, itself = parts_of(container, layout_of(kind) or Layout((), False))
            put_into(container, attributes, None if theirs is None else items, itself)
