"""Nested arguments and results, taken apart and put together again.

A *tree* is any nesting of tuples, lists, dicts, named tuples and dataclasses; everything else is a leaf. Exact
types are kept (an OrderedDict comes back as one), and so is the order of dictionary keys, which a function may see. With an
`Flattener` ordinary objects are taken apart as well (`opened`), which may refer to each other in circles.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterator
from functools import partial
from operator import itemgetter

from .._torch.dynamic import Leaves, Thing
from .._torch.pytree import SUPPORTED_NODES
from ..python.identity import identity
from ..python.origin import written_out
from .object_layout import layout_of, made_of
from .pytree_nodes import LEAVES, Back, Node, Opened, build, fill, is_dataclass, leaf_count, object_parts, taken_apart

__all__ = ["Flattener", "Opens", "can_be_opened", "containers", "contains_itself", "flatten", "goes_by_pytree",
           "has_only_attributes", "opened_in", "rebuilding", "unflatten"]  # fmt: skip


class Opens(Exception):
    """A capture has changed an object of these classes, and not what pytree gives of it. Never reaches the user: the capture is
    taken back, and made again."""

    def __init__(self, kinds: set[type]) -> None:
        super().__init__()
        self.kinds = kinds


class Flattener:
    """Lets ordinary objects be opened, and those of the classes `by_attributes`, though pytree knows another way to take them
    apart; none if it does not `open` any. What has an identity that is `shut` is a leaf, and what `lasts`, unless it is a list,
    a tuple or a dictionary. A container that is met again is the one that was met before, if that is asked for (`shares`).
    Afterwards `containers` are all containers met, each before what is in it, and `spans` the objects
    among them that can be leaves instead, with the first of their leaves and the first after them."""

    def __init__(
        self, shut: Container[int] = (), lasts: Container[int] = (), by_attributes: Container[type] = (), *,
        opens: bool = True, shares: bool = False,
    ) -> None:  # fmt: skip
        self.shut = shut
        self.lasts = lasts
        self.by_attributes = by_attributes
        self.opens = opens
        self.shares = shares
        self.containers: Leaves = []
        self.spans: list[tuple[object, int, int]] = []
        self._numbers: dict[int, int] = {}
        self._shared: dict[int, int] = {}

    def is_opened(self, thing: object) -> bool:
        """Whether this is an object that was opened."""
        return identity(thing) in self._numbers

    def outermost(self, at: int) -> tuple[object, int, int] | None:
        """The outermost object that has the leaf of this number in it."""
        return next((span for span in reversed(self.spans) if span[1] <= at < span[2]), None)

    def unfinished(self) -> object:
        """The outermost object that was not taken apart to its end."""
        ended = {identity(thing) for thing, _, _ in self.spans}
        return next((c for c in self.containers if self.is_opened(c) and identity(c) not in ended), None)

    def flatten(self, tree: Thing, leaves: list[object]) -> Node | None:
        kind = type(tree)
        if kind in LEAVES or identity(tree) in self.shut or (identity(tree) in self.lasts and kind not in _PLAIN):
            leaves.append(tree)
            return None
        if self.shares and (number := self._shared.get(identity(tree))) is not None:
            return Node(Back, (number, False), ())
        if kind is weakref.ref and (number := self._numbers.get(identity(tree()))) is not None:
            return Node(Back, (number, True), ())
        parts, layout = None if kind in self.by_attributes else taken_apart(tree), None
        if parts is None and self.opens and (layout := layout_of(kind)) is not None:
            if (number := self._numbers.get(identity(tree))) is not None:
                return Node(Back, (number, False), ())
            self._numbers[identity(tree)] = len(self.containers)
            parts = object_parts(tree, layout)
        if parts is None:
            leaves.append(tree)
            return None
        if len(self.containers) > _MANY:
            raise RecursionError
        if self.shares:
            self._shared[identity(tree)] = len(self.containers)
        self.containers.append(tree)
        start = len(leaves)
        children = tuple([self.flatten(value, leaves) for value in parts[1]])
        if layout is not None or is_dataclass(kind):
            self.spans.append((tree, start, len(leaves)))
        return (Node if layout is None else Opened)(kind, parts[0], children)


_MANY = 4096  # containers of one tree; objects that lead to more are as large as a program
_PLAIN = (tuple, list, dict, OrderedDict, defaultdict)


def opened_in(node: Node | None) -> set[type]:
    """The classes of the objects in a tree that were opened."""
    if node is None:
        return set()
    return set().union(*map(opened_in, node.children), [node.kind] if type(node) is Opened else [])


def goes_by_pytree(thing: object) -> bool:
    """Whether this is an object that is taken apart as its class has told pytree, and could be by its attributes."""
    return type(thing) in SUPPORTED_NODES and layout_of(type(thing)) is not None


def has_only_attributes(node: Node) -> bool:
    """Whether this is an object that was opened, and has nothing but a dictionary of attributes, in which these names stand."""
    layout = layout_of(node.kind) if type(node) is Opened else None
    return layout is not None and not layout.slots and not layout.items


def can_be_opened(thing: object) -> bool:
    """Whether this is a container, or an object that can be taken apart."""
    return taken_apart(thing) is not None or layout_of(type(thing)) is not None


def flatten(tree: object, leaves: list[object], flattener: Flattener | None = None) -> Node | None:
    """Append the leaves of `tree` to `leaves`, left to right; return its shape (None for a leaf). Without a flattener, a
    container that contains itself is a leaf.

    The shape is hashable when all dictionary keys are.
    """
    if flattener is not None:
        return flattener.flatten(tree, leaves)
    begin = len(leaves)
    try:
        return _flatten(tree, leaves)
    except RecursionError:
        leaves[begin:] = [tree]
        return None


def _flatten(tree: object, leaves: list[object]) -> Node | None:
    parts = taken_apart(tree)
    if parts is None:
        leaves.append(tree)
        return None
    names, values = parts
    return Node(type(tree), names, tuple([_flatten(v, leaves) for v in values]))


def contains_itself(tree: object) -> bool:
    """Whether this is a container whose end nothing can come to."""
    return flatten(tree, []) is None and taken_apart(tree) is not None


def unflatten(node: Node | None, leaves: Iterator[object], built: list[object] | None = None) -> Thing:
    """Rebuild the tree of shape `node` from `leaves`. Its containers are added to `built`, each before what is in it."""
    return next(leaves) if node is None else _unflatten(node, leaves, [] if built is None else built)


def _unflatten(node: Node | None, leaves: Iterator[object], built: Leaves) -> object:
    if node is None:
        return next(leaves)
    if node.kind is Back:
        number, weak = node.names
        return weakref.ref(built[number]) if weak else built[number]
    at = len(built)
    built.append(made_of(node.kind) if type(node) is Opened else None)
    values = [_unflatten(child, leaves, built) for child in node.children]
    if type(node) is Opened:
        fill(built[at], node.names, values)
    else:
        built[at] = build(node, values)
    return built[at]


def rebuilding(node: Node | None, given: int) -> Callable[[Leaves], Thing]:
    """`unflatten` of one shape, for a list of its leaves, `given` as many, which may be more than it has. It is called in each
    replay, and so it is written out, ``lambda m: (m[0], [m[1], m[2]])``, or where it can be left to Python altogether."""
    if node is None:
        return itemgetter(0)
    if node.kind in (tuple, list) and len(node.children) == given and not any(node.children):
        return node.kind
    if _is_circular(node):
        return lambda leaves: unflatten(node, iter(leaves))
    names: dict[str, object] = {}
    expression, _ = _written(node, 0, names, 0)
    rebuild: Callable[[Leaves], Thing] = written_out(f"lambda m: {expression}", names)
    return rebuild


def _written(node: Node | None, at: int, names: dict[str, object], depth: int) -> tuple[str, int]:
    """The expression for a shape whose leaves begin `at` a place, and where they end."""
    if node is None:
        return f"m[{at}]", at + 1
    if node.kind not in (tuple, list) or depth > 20:  # Python's parser has a limit
        end, name = at + leaf_count(node), f"part{len(names)}"
        names[name] = partial(unflatten, node)
        return f"{name}(iter(m[{at}:{end}]))", end
    parts = []
    for child in node.children:
        part, at = _written(child, at, names, depth + 1)
        parts.append(f"{part}, ")
    return ("(%s)" if node.kind is tuple else "[%s]") % "".join(parts), at


def _is_circular(node: Node | None) -> bool:
    return node is not None and (node.kind is Back or any(map(_is_circular, node.children)))


def containers(tree: object) -> Iterator[object]:
    """Every container of a tree that can change, outermost first."""
    parts = taken_apart(tree)
    if parts is not None:
        if not isinstance(tree, tuple):
            yield tree
        for value in parts[1]:
            yield from containers(value)
