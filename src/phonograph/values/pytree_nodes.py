"""One container of a tree: how each kind is taken apart into its children and what they are called, and made again of them.

Exact types are kept (an OrderedDict comes back as one), and so is the order of dictionary keys, which a function may see.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch

from .._torch.dynamic import Leaves, Thing
from .._torch.pytree import SUPPORTED_NODES
from ..python.introspection import slots_of
from .keys import nested_key, structure
from .object_layout import Layout, parts_of, put_into
from .tensor_subclasses import Description, is_taken_apart

__all__ = ["DICTS", "LEAVES", "Back", "Field", "Key", "Made", "Node", "Opened", "build", "divided", "fill", "is_dataclass",
           "is_tensor", "key_of", "leaf_count", "object_parts", "taken_apart"]  # fmt: skip


class Node(NamedTuple):
    """One container of a tree: its type, what its children are called, and the children's own nodes (None: a leaf)."""

    kind: type
    names: tuple[Thing, ...]
    children: tuple[Node | None, ...]


class Opened(Node):
    """An object that was opened. Its names are those of its attributes, and, if it is a dictionary as well, whether that is
    where it has them, and the keys."""

    __slots__ = ()


class Back:
    """As the kind of a node: an object that the tree has already, by its number among all containers, or a weak reference."""


LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, int, float, str, bool, type(None)})


def object_parts(tree: object, layout: Layout) -> tuple[tuple[object, ...], list[object]]:
    """What an opened object has: what its attributes and items are called, and their values."""
    names, values, items, itself = parts_of(tree, layout)
    if items is None:
        return names, values
    return (*names, itself, *map(_name, items)), [*values, *items.values()]


def fill(made: object, names: tuple[object, ...], values: list[object]) -> None:
    """Give an opened object its attributes and items."""
    own, itself, keys = divided(names)
    items = None if itself is None else dict(zip(keys, values[len(own) :], strict=True))
    put_into(made, dict(zip(own, values, strict=False)), items, bool(itself))


def divided(names: tuple[Thing, ...]) -> tuple[tuple[str, ...], bool | None, list[object]]:
    """The attributes of an opened object, whether its items are that, and their keys; None if it has none."""
    at = next((i for i, name in enumerate(names) if type(name) is bool), None)
    return (names, None, []) if at is None else (names[:at], names[at], [*map(key_of, names[at + 1 :])])


def leaf_count(node: Node | None) -> int:
    """How many leaves a tree of this shape has."""
    return 1 if node is None else sum(map(leaf_count, node.children))


def is_tensor(node: Node) -> bool:
    """Whether this is a tensor that was taken apart."""
    return bool(node.names) and type(node.names[-1]) is Made


def _fresh(context: Thing) -> Thing:
    """A context of its own for each object that is made from it."""
    if type(context) in (tuple, list):
        return type(context)(map(_fresh, context))
    if type(context) in (dict, OrderedDict):
        return type(context)((key, _fresh(value)) for key, value in context.items())
    return set(context) if type(context) is set else context


def is_dataclass(kind: type) -> bool:
    """(As `dataclasses.is_dataclass`, whose code asks for types: in a captured call numbers would not be followed then.)"""
    return hasattr(kind, "__dataclass_fields__") and kind not in SUPPORTED_NODES


def _is_namedtuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_structseq(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "n_fields") and kind.__module__ == "torch.return_types"


DICTS = (dict, OrderedDict, defaultdict)
_FACTORIES = (None, list, dict, set, tuple, int, float, str, bool)  # of which nothing more need be known


def _is_dict(tree: Thing) -> bool:
    """Whether there is nothing to it but its items."""
    kind = type(tree)
    if kind is defaultdict:
        return tree.default_factory in _FACTORIES
    return kind is dict or kind is OrderedDict


def taken_apart(tree: Thing) -> tuple[tuple[object, ...], list[object]] | None:
    """What the children of a container are called, and the children; None for what is a leaf, or can only be opened."""
    kind = type(tree)
    if kind is torch.Size:
        return None
    if kind in (tuple, list) or _is_structseq(kind):
        return (), list(tree)
    if _is_namedtuple(kind):
        return None if getattr(tree, "__dict__", None) else ((), list(tree))
    if kind in DICTS:
        if not _is_dict(tree):
            return None
        if kind is defaultdict:
            return (*map(_name, tree), Key(tree.default_factory)), list(tree.values())
        if kind is OrderedDict and tree.__dict__:  # as state_dict() has them
            return (*map(_name, tree), _Attributes(tree.__dict__)), [*tree.values(), None]
        return tuple(map(_name, tree)), list(tree.values())
    if is_dataclass(kind):
        makes: object = kind.__new__
        if makes is not object.__new__ or isinstance(tree, torch.nn.Module):
            return None  # more than its fields: a dictionary, an exception, a module
        names = tuple(f.name for f in dataclasses.fields(kind) if hasattr(tree, f.name))
        if {n for base in kind.__mro__ for n, _ in slots_of(base)} - set(names):
            return None  # slots that are no fields
        names += tuple(n for n in getattr(tree, "__dict__", ()) if n not in names)  # set by __post_init__, or by hand
        return names, [getattr(tree, n) for n in names]
    if kind in SUPPORTED_NODES:
        values, context = SUPPORTED_NODES[kind].flatten_fn(tree)
        return (_Context(context),), list(values)
    if kind not in LEAVES and issubclass(kind, torch.Tensor) and is_taken_apart(tree):
        of = Description.of(tree)
        return (*of.names, Made(of)), [getattr(tree, name) for name in of.names]
    return None


class Field(str):
    """The name of an attribute, as a step on the way to a leaf."""

    __slots__ = ()


class Key:
    """A dictionary's key that is no string, or pytree's context of a registered type, as part of a signature: compared as
    other values are, and not as Python does, to which 1, 1.0 and True are equal."""

    __slots__ = ("_of", "value")
    copied = False
    """Whether what is built from it has a copy."""
    of_pytree = False

    def __init__(self, value: Thing) -> None:
        self.value = value
        self._of: object = None

    def _identity(self) -> object:
        if self._of is None:
            self._of = self._described()
        return self._of

    def _described(self) -> object:
        return nested_key(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and (self is other or bool(self._identity() == other._identity()))

    def __hash__(self) -> int:
        return hash(self._identity())


class _Context(Key):
    """What pytree says of an object besides its children."""

    __slots__ = ()
    of_pytree = True

    def _described(self) -> object:
        return nested_key(self.value, structure)


class Made(Key):
    """What a tensor is besides its parts."""

    __slots__ = ()

    def _described(self) -> object:
        return self.value.key()


class _Attributes(Key):
    """What a dictionary has besides its items; stands where a key does, for a value of None."""

    __slots__ = ()
    copied = True

    def __init__(self, value: dict[str, object]) -> None:
        super().__init__(dict(value))


def _name(key: object) -> object:
    return key if type(key) is str else Key(key)


def key_of(name: object) -> object:
    """The key, or the other thing, that has this name."""
    return name.value if isinstance(name, Key) else name


def build(node: Node, values: Leaves) -> object:
    """A container of this kind with these children."""
    kind: Callable[..., object] = node.kind
    if kind in (tuple, list) or _is_structseq(node.kind):
        return kind(values)
    if is_tensor(node):
        return node.names[-1].value.around(values)
    if _is_namedtuple(node.kind):
        return tuple.__new__(node.kind, values)
    if kind is defaultdict:
        filled: defaultdict[object, object] = defaultdict(node.names[-1].value)
        filled.update(zip(map(key_of, node.names[:-1]), values, strict=True))
        return filled
    if kind in DICTS:
        build: Callable[..., Thing] = node.kind
        extra = node.names[-1].value if node.names and type(node.names[-1]) is _Attributes else None
        n = len(node.names) - (extra is not None)
        made = build(zip(map(key_of, node.names[:n]), values[:n], strict=True))
        if extra is not None:
            made.__dict__.update(copy.deepcopy(extra))
        return made
    if node.kind in SUPPORTED_NODES:
        return SUPPORTED_NODES[node.kind].unflatten_fn(values, _fresh(node.names[0].value))
    made = object.__new__(node.kind)  # not copy.copy, which leaves a note on the class
    for name, value in zip(node.names, values, strict=True):
        object.__setattr__(made, name, value)
    return made
