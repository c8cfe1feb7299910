"""What can be asked of the shape of a tree: what is in it, what it is called, and the way to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from .keys import NoSignature
from .object_layout import layout_of, parts_of
from .pytree_nodes import DICTS, Back, Field, Key, Made, Node, Opened, divided, is_dataclass, is_tensor, key_of, leaf_count

__all__ = ["attributes_of", "inside", "kinds", "labels", "parting", "path_to", "tensors_apart", "unhashable"]


def kinds(node: Node | None) -> Iterator[type]:
    """The types of all containers of a tree."""
    if node is not None and node.kind is not Back:
        yield node.kind
        for child in node.children:
            yield from kinds(child)


def path_to(node: Node | None, at: int) -> list[object]:
    """The way to the leaf of this number: an index, a key or a `Field` for each container."""
    for step, child in zip(_steps(node), node.children, strict=True) if node is not None else ():
        size = leaf_count(child)
        if at < size:
            return [step, *path_to(child, at)]
        at -= size
    return []


def parting(was: Node | None, now: Node | None) -> tuple[list[object], Node | None, Node | None]:
    """The way to the first place where two trees differ in shape, and what each has there."""
    if was is None or now is None or was[:2] != now[:2] or len(was.children) != len(now.children):
        return [], was, now
    for step, one, other in zip(_steps(now), was.children, now.children, strict=True):
        if one != other:
            way, one, other = parting(one, other)
            return [step, *way], one, other
    return [], was, now


def unhashable(node: Node | None) -> list[object] | None:
    """The way to the first container with a key, or something else besides its children, that cannot be compared."""
    if node is None:
        return None
    for name in node.names:
        if isinstance(name, Key):
            try:
                hash(name)
            except (NoSignature, TypeError):
                return []
    ways = zip(_steps(node), map(unhashable, node.children), strict=True)
    return next(([step, *way] for step, way in ways if way is not None), None)


def _steps(node: Node) -> Sequence[object]:
    if node.kind in (tuple, list):
        return range(len(node.children))
    if node.kind in DICTS:
        return [key_of(name) for name in node.names][: len(node.children)]
    if type(node) is Opened:
        own, _, keys = divided(node.names)
        return [*map(Field, own), *keys]
    if is_dataclass(node.kind):
        return [Field(name) for name in node.names]
    if is_tensor(node):
        return [Field(name) for name in node.names[:-1]]
    fields = getattr(node.kind, "_fields", ())
    return [Field(name) for name in fields] if len(fields) == len(node.children) else range(len(node.children))


def attributes_of(node: Node | None) -> list[tuple[int, str] | None]:
    """For each leaf that is an attribute of an object, the number of that among all containers, and the name; else None."""
    found: list[tuple[int, str] | None] = []
    _attributes(node, None, found, count())
    return found


def _attributes(
    node: Node | None, owner: tuple[int, str] | None, found: list[tuple[int, str] | None], numbers: Iterator[int]
) -> None:  # fmt: skip
    if node is None:
        found.append(owner)
    elif node.kind is not Back:
        number, of_object = next(numbers), type(node) is Opened or is_dataclass(node.kind)
        for step, child in zip(_steps(node), node.children, strict=False):
            _attributes(child, (number, step) if of_object and isinstance(step, Field) else None, found, numbers)


def tensors_apart(node: Node | None, at: int = 0) -> list[range]:
    """For each tensor that was taken apart, which of the leaves it consists of."""
    if node is None:
        return []
    if is_tensor(node):
        return [range(at, at + leaf_count(node))]
    found = []
    for child in node.children:
        found += tensors_apart(child, at)
        at += leaf_count(child)
    return found


def labels(node: Node | None) -> Iterator[Key]:
    """What the containers of a tree have besides their children, but for names: keys of dictionaries that are no strings, the
    contexts of pytree's registered types. (What is said of tensors is said in full.)"""
    if node is not None:
        yield from (name for name in node.names if isinstance(name, Key) and type(name) is not Made)
        for child in node.children:
            yield from labels(child)


def inside(value: object) -> Iterator[object]:
    """The value of a label and, where it is a container or an object, all that is in it."""
    yield value
    layout = layout_of(type(value))
    if layout is not None:
        for part in parts_of(value, layout).values:
            yield from inside(part)
    elif isinstance(value, (tuple, list, set, frozenset, dict)):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from inside(part)
