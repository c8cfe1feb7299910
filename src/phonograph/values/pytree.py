"""Nested arguments and results, taken apart and put together again.

A *tree* is any nesting of tuples, lists, dicts, named tuples and dataclasses; everything else is a leaf. Exact
types are kept (an OrderedDict comes back as one), and so is the order of dictionary keys, which a function may see. With an
`Opening` ordinary objects are taken apart as well (`opened`), which may refer to each other in circles.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterator, MutableMapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from .._torch.dynamic import Leaves, Table
from .._torch.pytree import SUPPORTED_NODES
from ..python.identity import identity
from ..python.introspection import slots_of
from ..python.origin import written_out
from .keys import NoSignature, nested_key, structure
from .object_layout import Layout, layout_of, made_of, parts_of, put_into, replace
from .tensor_subclasses import Description, is_taken_apart

__all__ = ["Edit", "Field", "Node", "Opening", "Opens", "can_be_opened", "containers", "entries", "flatten", "goes_by_pytree",
           "has_only_attributes", "inside", "kinds", "labels", "opened_in", "path_to", "rebuilding",
           "tensors_apart", "unflatten", "unhashable"]  # fmt: skip


class Node(NamedTuple):
    """One container of a tree: its type, what its children are called, and the children's own nodes (None: a leaf)."""

    kind: type
    names: tuple[Any, ...]
    children: tuple[Node | None, ...]


class _Opened(Node):
    """An object that was opened. Its names are those of its attributes, and, if it is a dictionary as well, whether that is
    where it has them, and the keys."""

    __slots__ = ()


class _Back:
    """As the kind of a node: an object that the tree has already, by its number among all containers, or a weak reference."""


class Opens(Exception):
    """A capture has changed an object of these classes, and not what pytree gives of it. Never reaches the user: the capture is
    taken back, and made again."""

    def __init__(self, kinds: set[type]) -> None:
        super().__init__()
        self.kinds = kinds


class Opening:
    """Lets ordinary objects be opened, and those of the classes `by_attributes`, though pytree knows another way to take them
    apart. What has an identity that is `shut` is a leaf, and what `lasts`, unless it is a list, a tuple or a dictionary.
    Afterwards `containers` are all containers met, each before what is in it, and `spans` the objects
    among them that can be leaves instead, with the first of their leaves and the first after them."""

    def __init__(
        self, shut: Container[int] = (), lasts: Container[int] = (), by_attributes: Container[type] = ()
    ) -> None:  # fmt: skip
        self.shut = shut
        self.lasts = lasts
        self.by_attributes = by_attributes
        self.containers: Leaves = []
        self.spans: list[tuple[object, int, int]] = []
        self._numbers: dict[int, int] = {}

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

    def flatten(self, tree: Any, leaves: list[object]) -> Node | None:
        kind = type(tree)
        if kind in _LEAVES or identity(tree) in self.shut or (identity(tree) in self.lasts and kind not in _PLAIN):
            leaves.append(tree)
            return None
        if kind is weakref.ref and (number := self._numbers.get(identity(tree()))) is not None:
            return Node(_Back, (number, True), ())
        parts, layout = None if kind in self.by_attributes else _parts(tree), None
        if parts is None and (layout := layout_of(kind)) is not None:
            if (number := self._numbers.get(identity(tree))) is not None:
                return Node(_Back, (number, False), ())
            self._numbers[identity(tree)] = len(self.containers)
            parts = _parts_of(tree, layout)
        if parts is None:
            leaves.append(tree)
            return None
        if len(self.containers) > _MANY:
            raise RecursionError
        self.containers.append(tree)
        start = len(leaves)
        children = tuple([self.flatten(value, leaves) for value in parts[1]])
        if layout is not None or _is_dataclass(kind):
            self.spans.append((tree, start, len(leaves)))
        return (Node if layout is None else _Opened)(kind, parts[0], children)


_MANY = 4096  # containers of one tree; objects that lead to more are as large as a program
_PLAIN = (tuple, list, dict, OrderedDict, defaultdict)
_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, int, float, str, bool, type(None)})


def opened_in(node: Node | None) -> set[type]:
    """The classes of the objects in a tree that were opened."""
    if node is None:
        return set()
    return set().union(*map(opened_in, node.children), [node.kind] if type(node) is _Opened else [])


def goes_by_pytree(thing: object) -> bool:
    """Whether this is an object that is taken apart as its class has told pytree, and could be by its attributes."""
    return type(thing) in SUPPORTED_NODES and layout_of(type(thing)) is not None


def has_only_attributes(node: Node) -> bool:
    """Whether this is an object that was opened, and has nothing but a dictionary of attributes, in which these names stand."""
    layout = layout_of(node.kind) if type(node) is _Opened else None
    return layout is not None and not layout.slots and not layout.items


def can_be_opened(thing: object) -> bool:
    """Whether this is a container, or an object that can be taken apart."""
    return _parts(thing) is not None or layout_of(type(thing)) is not None


def _parts_of(tree: object, layout: Layout) -> tuple[tuple[object, ...], list[object]]:
    names, values, items, itself = parts_of(tree, layout)
    if items is None:
        return names, values
    return (*names, itself, *map(_name, items)), [*values, *items.values()]


def flatten(tree: object, leaves: list[object], opening: Opening | None = None) -> Node | None:
    """Append the leaves of `tree` to `leaves`, left to right; return its shape (None for a leaf).

    The shape is hashable when all dictionary keys are.
    """
    if opening is not None:
        return opening.flatten(tree, leaves)
    parts = _parts(tree)
    if parts is None:
        leaves.append(tree)
        return None
    names, values = parts
    return Node(type(tree), names, tuple([flatten(v, leaves) for v in values]))


def unflatten(node: Node | None, leaves: Iterator[object], built: list[object] | None = None) -> Any:
    """Rebuild the tree of shape `node` from `leaves`. Its containers are added to `built`, each before what is in it."""
    return next(leaves) if node is None else _unflatten(node, leaves, [] if built is None else built)


def _unflatten(node: Node | None, leaves: Iterator[object], built: Leaves) -> object:
    if node is None:
        return next(leaves)
    if node.kind is _Back:
        number, weak = node.names
        return weakref.ref(built[number]) if weak else built[number]
    at = len(built)
    built.append(made_of(node.kind) if type(node) is _Opened else None)
    values = [_unflatten(child, leaves, built) for child in node.children]
    if type(node) is _Opened:
        _fill(built[at], node.names, values)
    else:
        built[at] = _build(node, values)
    return built[at]


def _fill(made: object, names: tuple[object, ...], values: list[object]) -> None:
    own, itself, keys = _divided(names)
    items = None if itself is None else dict(zip(keys, values[len(own) :], strict=True))
    put_into(made, dict(zip(own, values, strict=False)), items, bool(itself))


def _divided(names: tuple[Any, ...]) -> tuple[tuple[str, ...], bool | None, list[object]]:
    """The attributes of an opened object, whether its items are that, and their keys; None if it has none."""
    at = next((i for i, name in enumerate(names) if type(name) is bool), None)
    return (names, None, []) if at is None else (names[:at], names[at], [*map(_key, names[at + 1 :])])


def entries(container: Any, by_attributes: Container[type] = ()) -> dict[tuple[bool, Any], Any] | None:
    """What a container holds, by what it is called: (whether that is an item, its key or name). None if it cannot be set. An
    object of the classes `by_attributes` holds these."""
    kind = type(container)
    if kind in (list, tuple):
        return {(True, i): value for i, value in enumerate(container)} if kind is list else None
    if kind in _DICTS:
        return {(True, key): value for key, value in container.items()}
    parts = _parts(container) if kind not in by_attributes else None
    if parts is not None and _is_dataclass(kind):
        return {(False, name): value for name, value in zip(*parts, strict=True)}
    if parts is not None:
        return _mapped(container, parts[1])
    layout = layout_of(kind)
    if layout is None:
        return None
    names, values, items, _ = parts_of(container, layout)
    return {(False, n): v for n, v in zip(names, values, strict=True)} | {(True, k): v for k, v in (items or {}).items()}


def _mapped(container: Any, values: list[object]) -> dict[tuple[bool, object], object] | None:
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

    def repeat(self, container: Any, values: Sequence[object]) -> None:
        """Do the same to another container that held the same, with these new values."""
        found, new = entries(container, self.by_attributes) or {}, dict(zip(self.new, values, strict=True))
        now = {at: new[at] if at in new else found[at] for at in self.all}
        items = {key: value for (is_item, key), value in now.items() if is_item}
        attributes = {name: value for (is_item, name), value in now.items() if not is_item}
        kind = type(container)
        if kind is list:
            container[:] = items.values()
        elif kind in _DICTS:
            replace(container, items)
        elif kind in SUPPORTED_NODES and kind not in self.by_attributes:
            for _, key in found.keys() - now.keys():
                del container[key]
            for _, key in self.new:
                container[key] = items[key]
        elif _is_dataclass(kind):
            for _, name in found.keys() - now.keys():
                object.__delattr__(container, name)
            for _, name in self.new:
                object.__setattr__(container, name, attributes[name])
        else:
            _, _, theirs, itself = parts_of(container, layout_of(kind) or Layout((), False))
            put_into(container, attributes, None if theirs is None else items, itself)


def rebuilding(node: Node | None, given: int) -> Callable[[Leaves], Any]:
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
    rebuild: Callable[[Leaves], Any] = written_out(f"lambda m: {expression}", names)
    return rebuild


def _written(node: Node | None, at: int, names: dict[str, object], depth: int) -> tuple[str, int]:
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


def _is_circular(node: Node | None) -> bool:
    return node is not None and (node.kind is _Back or any(map(_is_circular, node.children)))


def _size(node: Node | None) -> int:
    return 1 if node is None else sum(map(_size, node.children))


def kinds(node: Node | None) -> Iterator[type]:
    """The types of all containers of a tree."""
    if node is not None and node.kind is not _Back:
        yield node.kind
        for child in node.children:
            yield from kinds(child)


def path_to(node: Node | None, at: int) -> list[object]:
    """The way to the leaf of this number: an index, a key or a `Field` for each container."""
    for step, child in zip(_steps(node), node.children, strict=True) if node is not None else ():
        size = _size(child)
        if at < size:
            return [step, *path_to(child, at)]
        at -= size
    return []


def unhashable(node: Node | None) -> list[object] | None:
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


def _steps(node: Node) -> Sequence[object]:
    if node.kind in (tuple, list):
        return range(len(node.children))
    if node.kind in _DICTS:
        return [_key(name) for name in node.names][: len(node.children)]
    if type(node) is _Opened:
        own, _, keys = _divided(node.names)
        return [*map(Field, own), *keys]
    if _is_dataclass(node.kind):
        return [Field(name) for name in node.names]
    if _is_tensor(node):
        return [Field(name) for name in node.names[:-1]]
    fields = getattr(node.kind, "_fields", ())
    return [Field(name) for name in fields] if len(fields) == len(node.children) else range(len(node.children))


def _is_tensor(node: Node) -> bool:
    return bool(node.names) and type(node.names[-1]) is _Made


def tensors_apart(node: Node | None, at: int = 0) -> list[range]:
    """For each tensor that was taken apart, which of the leaves it consists of."""
    if node is None:
        return []
    if _is_tensor(node):
        return [range(at, at + _size(node))]
    found = []
    for child in node.children:
        found += tensors_apart(child, at)
        at += _size(child)
    return found


def containers(tree: object) -> Iterator[object]:
    """Every container of a tree that can change, outermost first."""
    parts = _parts(tree)
    if parts is not None:
        if not isinstance(tree, tuple):
            yield tree
        for value in parts[1]:
            yield from containers(value)


def labels(node: Node | None) -> Iterator[_Key]:
    """What the containers of a tree have besides their children, but for names: keys of dictionaries that are no strings, the
    contexts of pytree's registered types. (What is said of tensors is said in full.)"""
    if node is not None:
        yield from (name for name in node.names if isinstance(name, _Key) and type(name) is not _Made)
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


def _fresh(context: Any) -> Any:
    """A context of its own for each object that is made from it."""
    if type(context) in (tuple, list):
        return type(context)(map(_fresh, context))
    if type(context) in (dict, OrderedDict):
        return type(context)((key, _fresh(value)) for key, value in context.items())
    return set(context) if type(context) is set else context


def _is_dataclass(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) and kind not in SUPPORTED_NODES


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


def _parts(tree: Any) -> tuple[tuple[object, ...], list[object]] | None:
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
    if _is_dataclass(kind):
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
    if kind not in _LEAVES and issubclass(kind, torch.Tensor) and is_taken_apart(tree):
        of = Description.of(tree)
        return (*of.names, _Made(of)), [getattr(tree, name) for name in of.names]
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
    of_pytree = False

    def __init__(self, value: Any) -> None:
        self.value = value
        self._of = None

    def _identity(self) -> object:
        if self._of is None:
            self._of = self._described()
        return self._of

    def _described(self) -> Any:
        return nested_key(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and (self is other or bool(self._identity() == other._identity()))

    def __hash__(self) -> int:
        return hash(self._identity())


class _Context(_Key):
    """What pytree says of an object besides its children."""

    __slots__ = ()
    of_pytree = True

    def _described(self) -> Any:
        return nested_key(self.value, structure)


class _Made(_Key):
    """What a tensor is besides its parts."""

    __slots__ = ()

    def _described(self) -> Any:
        return self.value.key()


class _Attributes(_Key):
    """What a dictionary has besides its items; stands where a key does, for a value of None."""

    __slots__ = ()
    copied = True

    def __init__(self, value: dict[str, object]) -> None:
        super().__init__(dict(value))


def _name(key: object) -> object:
    return key if type(key) is str else _Key(key)


def _key(name: object) -> object:
    return name.value if isinstance(name, _Key) else name


def _build(node: Node, values: Leaves) -> Any:
    kind: Callable[..., object] = node.kind
    if kind in (tuple, list) or _is_structseq(node.kind):
        return kind(values)
    if _is_tensor(node):
        return node.names[-1].value.around(values)
    if _is_namedtuple(node.kind):
        return tuple.__new__(node.kind, values)
    if kind is defaultdict:
        filled: defaultdict[object, object] = defaultdict(node.names[-1].value)
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
    if node.kind in SUPPORTED_NODES:
        return SUPPORTED_NODES[node.kind].unflatten_fn(values, _fresh(node.names[0].value))
    made = object.__new__(node.kind)  # not copy.copy, which leaves a note on the class
    for name, value in zip(node.names, values, strict=True):
        object.__setattr__(made, name, value)
    return made
