"""Nested arguments and results, taken apart and put together again.

A *tree* is any nesting of tuples, lists, dicts, named tuples and dataclasses; everything else is a leaf. Exact
types are kept (an OrderedDict comes back as one), and so is the order of dictionary keys, which a function may see.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from .introspection import slots_of
from .keys import NoSignature, nested_key
from .where import written_out

__all__ = ["Field", "Node", "containers", "flatten", "inside", "kinds", "labels", "path_to", "rebuilding", "unflatten",
           "unhashable"]  # fmt: skip


class Node(NamedTuple):
    """One container of a tree: its type, what its children are called, and the children's own nodes (None: a leaf)."""

    kind: type
    names: tuple[Any, ...]
    children: tuple[Node | None, ...]


def flatten(tree: Any, leaves: list[Any]) -> Node | None:
    """Append the leaves of `tree` to `leaves`, left to right; return its shape (None for a leaf).

    The shape is hashable when all dictionary keys are.
    """
    parts = _parts(tree)
    if parts is None:
        leaves.append(tree)
        return None
    names, values = parts
    return Node(type(tree), names, tuple([flatten(v, leaves) for v in values]))


def unflatten(node: Node | None, leaves: Iterator[Any]) -> Any:
    """Rebuild the tree of shape `node` from `leaves`."""
    return next(leaves) if node is None else _build(node, [unflatten(child, leaves) for child in node.children])


def rebuilding(node: Node | None, given: int) -> Callable[[list[Any]], Any]:
    """`unflatten` of one shape, for a list of its leaves, `given` as many, which may be more than it has. It is called in each
    replay, and so it is written out, ``lambda m: (m[0], [m[1], m[2]])``, or where it can be left to Python altogether."""
    if node is None:
        return itemgetter(0)
    if node.kind in (tuple, list) and len(node.children) == given and not any(node.children):
        return node.kind
    names: dict[str, Any] = {}
    expression, _ = _written(node, 0, names, 0)
    rebuild: Callable[[list[Any]], Any] = written_out(f"lambda m: {expression}", names)
    return rebuild


def _written(node: Node | None, at: int, names: dict[str, Any], depth: int) -> tuple[str, int]:
    """The expression for a shape whose leaves begin `at` a place, and where they end."""
    if node is None:
        return f"m[{at}]", at + 1
    if node.kind not in (tuple, list) or depth > 20:  # Python's parser has a limit
        end, name = at + _size(node), f"part{len(names)}"
        names[name] = partial(unflatten, node)
        return f"{name}(iter(m[{at}:{end}]))", end
    parts = []
    for child in node.children:
        part, at = _written(child, at, names, depth + 1)
        parts.append(f"{part}, ")
    return ("(%s)" if node.kind is tuple else "[%s]") % "".join(parts), at


def _size(node: Node | None) -> int:
    return 1 if node is None else sum(map(_size, node.children))


def kinds(node: Node | None) -> Iterator[type]:
    """The types of all containers of a tree."""
    if node is not None:
        yield node.kind
        for child in node.children:
            yield from kinds(child)


def path_to(node: Node | None, at: int) -> list[Any]:
    """The way to the leaf of this number: an index, a key or a `Field` for each container."""
    for step, child in zip(_steps(node), node.children, strict=True) if node is not None else ():
        size = _size(child)
        if at < size:
            return [step, *path_to(child, at)]
        at -= size
    return []


def unhashable(node: Node | None) -> list[Any] | None:
    """The way to the first container with a key, or something else besides its children, that cannot be compared."""
    if node is None:
        return None
    for name in node.names:
        if isinstance(name, _Key):
            try:
                hash(name)
            except (NoSignature, TypeError):
                return []
    ways = zip(_steps(node), map(unhashable, node.children), strict=True)
    return next(([step, *way] for step, way in ways if way is not None), None)


def _steps(node: Node) -> Sequence[Any]:
    if node.kind in (tuple, list):
        return range(len(node.children))
    if node.kind in _DICTS:
        return [_key(name) for name in node.names][: len(node.children)]
    if dataclasses.is_dataclass(node.kind) and node.kind not in _pytree.SUPPORTED_NODES:
        return [Field(name) for name in node.names]
    fields = getattr(node.kind, "_fields", ())
    return [Field(name) for name in fields] if len(fields) == len(node.children) else range(len(node.children))


def containers(tree: Any) -> Iterator[Any]:
    """Every container of a tree that can change, outermost first."""
    parts = _parts(tree)
    if parts is not None:
        if not isinstance(tree, tuple):
            yield tree
        for value in parts[1]:
            yield from containers(value)


def labels(node: Node | None) -> Iterator[_Key]:
    """What the containers of a tree have besides their children, but for names: keys of dictionaries that are no strings, the
    contexts of pytree's registered types."""
    if node is not None:
        yield from (name for name in node.names if isinstance(name, _Key))
        for child in node.children:
            yield from labels(child)


def inside(value: Any) -> Iterator[Any]:
    """The value of a label and, where it is a container, all that is in it."""
    yield value
    if isinstance(value, (tuple, list, set, frozenset, dict)):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from inside(part)


def _fresh(context: Any) -> Any:
    """A context of its own for each object that is made from it."""
    if type(context) in (tuple, list):
        return type(context)(map(_fresh, context))
    if type(context) in (dict, OrderedDict):
        return type(context)((key, _fresh(value)) for key, value in context.items())
    return set(context) if type(context) is set else context


def _is_namedtuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_structseq(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "n_fields") and kind.__module__ == "torch.return_types"


_DICTS = (dict, OrderedDict, defaultdict)
_FACTORIES = (None, list, dict, set, tuple, int, float, str, bool)  # of which nothing more need be known


def _is_dict(tree: Any) -> bool:
    """Whether there is nothing to it but its items."""
    kind = type(tree)
    if kind is defaultdict:
        return tree.default_factory in _FACTORIES
    return kind is dict or kind is OrderedDict


def _parts(tree: Any) -> tuple[tuple[Any, ...], list[Any]] | None:
    kind = type(tree)
    if kind is torch.Size:
        return None
    if kind in (tuple, list) or _is_structseq(kind):
        return (), list(tree)
    if _is_namedtuple(kind):
        return None if getattr(tree, "__dict__", None) else ((), list(tree))
    if kind in _DICTS:
        if not _is_dict(tree):
            return None
        if kind is defaultdict:
            return (*map(_name, tree), _Key(tree.default_factory)), list(tree.values())
        if kind is OrderedDict and tree.__dict__:  # as state_dict() has them
            return (*map(_name, tree), _Attributes(tree.__dict__)), [*tree.values(), None]
        return tuple(map(_name, tree)), list(tree.values())
    if dataclasses.is_dataclass(kind) and kind not in _pytree.SUPPORTED_NODES:
        if kind.__new__ is not object.__new__ or isinstance(tree, torch.nn.Module):
            return None  # more than its fields: a dictionary, an exception, a module
        names = tuple(f.name for f in dataclasses.fields(kind) if hasattr(tree, f.name))
        if {n for base in kind.__mro__ for n, _ in slots_of(base)} - set(names):
            return None  # slots that are no fields
        names += tuple(n for n in getattr(tree, "__dict__", ()) if n not in names)  # set by __post_init__, or by hand
        return names, [getattr(tree, n) for n in names]
    if kind in _pytree.SUPPORTED_NODES:
        values, context = _pytree.SUPPORTED_NODES[kind].flatten_fn(tree)
        return (_Key(context),), list(values)
    return None


class Field(str):
    """The name of an attribute, as a step on the way to a leaf."""

    __slots__ = ()


class _Key:
    """A dictionary's key that is no string, or pytree's context of a registered type, as part of a signature: compared as
    other values are, and not as Python does, to which 1, 1.0 and True are equal."""

    __slots__ = ("_of", "value")
    copied = False
    """Whether what is built from it has a copy."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._of: Any = None

    def _identity(self) -> Any:
        if self._of is None:
            self._of = nested_key(self.value)
        return self._of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and (self is other or bool(self._identity() == other._identity()))

    def __hash__(self) -> int:
        return hash(self._identity())


class _Attributes(_Key):
    """What a dictionary has besides its items; stands where a key does, for a value of None."""

    __slots__ = ()
    copied = True

    def __init__(self, value: dict[str, Any]) -> None:
        super().__init__(dict(value))


def _name(key: Any) -> Any:
    return key if type(key) is str else _Key(key)


def _key(name: Any) -> Any:
    return name.value if isinstance(name, _Key) else name


def _build(node: Node, values: list[Any]) -> Any:
    kind: Callable[..., Any] = node.kind
    if kind in (tuple, list) or _is_structseq(node.kind):
        return kind(values)
    if _is_namedtuple(node.kind):
        return tuple.__new__(node.kind, values)
    if kind is defaultdict:
        filled: defaultdict[Any, Any] = defaultdict(node.names[-1].value)
        filled.update(zip(map(_key, node.names[:-1]), values, strict=True))
        return filled
    if kind in _DICTS:
        build: Callable[..., Any] = node.kind
        extra = node.names[-1].value if node.names and type(node.names[-1]) is _Attributes else None
        n = len(node.names) - (extra is not None)
        made = build(zip(map(_key, node.names[:n]), values[:n], strict=True))
        if extra is not None:
            made.__dict__.update(copy.deepcopy(extra))
        return made
    if node.kind in _pytree.SUPPORTED_NODES:
        return _pytree.SUPPORTED_NODES[node.kind].unflatten_fn(values, _fresh(node.names[0].value))
    made = object.__new__(node.kind)  # not copy.copy, which leaves a note on the class
    for name, value in zip(node.names, values, strict=True):
        object.__setattr__(made, name, value)
    return made
