"""Several calls of a function as one: `pg.record(step, steps=k)`.

A tensor among the arguments has a leading dimension of k, and each call gets its slice. All else is the same for each call.
Arguments that are carried come from the result of the call before. The calls are plain ones, one after the other: so a live
call is a loop, and a capture sees one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch

from .._torch.dynamic import Leaves, Thing
from ..options import Options, unknown_parameter
from ..values.pytree import flatten, unflatten
from ..values.pytree_nodes import Node, build, taken_apart

__all__ = ["Unrolled"]

_Input = Callable[[int], object]


class Unrolled:
    """A function that calls another one `steps` times."""

    __slots__ = ("__dict__", "__weakref__", "_carry", "_function", "_options", "_places", "_steps")

    def __init__(self, function: Callable[..., object], steps: int, options: Options) -> None:
        functools.update_wrapper(self, function)
        self._function, self._steps, self._options = function, steps, options
        self._carry: dict[str, object] = dict(options.carry)
        self._places = _places(function, carry=self._carry, shared=options.shared)

    @property
    def function(self) -> Callable[..., Any]:
        """The function that is called."""
        return self._function

    @property
    def __self__(self) -> object:
        """The instance, if the function is its method; None otherwise."""
        return getattr(self._function, "__self__", None)

    def reached(self) -> tuple[object, ...]:
        """What a call can reach besides its arguments."""
        return (self._function,)

    def bound(self, instance: object) -> Unrolled:
        """The same for a method of this instance."""
        return Unrolled(MethodType(self._function, instance), self._steps, self._options)

    def __call__(self, /, *args: object, **kwargs: object) -> object:
        names = [*self._places[: len(args)], *(f"argument {i}" for i in range(len(self._places), len(args)))]
        positional = [*map(self._input, names, args)]
        by_name = {name: self._input(name, value) for name, value in kwargs.items()}
        how, kept, result = self._options.results, [], None
        for step in range(self._steps):
            if step:
                kept.append(_kept(result, how))
            mine, named = [x(step) for x in positional], {name: x(step) for name, x in by_name.items()}
            for name, key in self._carry.items() if step else ():
                value = _item(result, key)
                if name in names:
                    mine[names.index(name)] = value
                else:
                    named[name] = value
            result = self._function(*mine, **named)
        return _joined(kept, result, how)

    def _input(self, name: str, value: object) -> _Input:
        """What each step gets for an argument.

        Raises:
            ValueError: a tensor has another leading dimension than the number of steps.
        """
        leaves: Leaves = []
        shape = flatten(value, leaves)
        stacks = {i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
        if not stacks or name in self._carry or name in self._options.shared:
            return lambda _: value
        for x in (leaves[i] for i in stacks):
            if x.dim() == 0 or len(x) != self._steps:
                share = f"shared={name!r}" if name.isidentifier() else "let its parameter have a name, for shared="
                raise ValueError(f"steps={self._steps}: {name} has a tensor of shape {tuple(x.shape)}, whose leading dimension "
                                 f"is not {self._steps} (if each step gets it as it is: {share})")  # fmt: skip
        return lambda step: unflatten(shape, iter([x[step] if i in stacks else x for i, x in enumerate(leaves)]))


def _places(function: Callable[..., object], **named: Iterable[str]) -> list[str]:
    """The names of the positional parameters.

    Raises:
        ValueError: an option names what is no parameter.
    """
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except ValueError:  # it has no signature
        parameters = []
    known = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for option, names in named.items():
            for name in names:
                if name not in known:
                    raise unknown_parameter(option, name, known)
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _item(result: Thing, key: object) -> object:
    """The item of a result from which an argument is fed.

    Raises:
        TypeError: the result has no items, or no such attribute.
    """
    if key is None:
        return result
    if isinstance(key, str) and not isinstance(result, Mapping):
        if not hasattr(result, key):
            raise TypeError(f"carry takes attribute {key!r} of the result, which is a {type(result).__name__} and has none")
        return getattr(result, key)
    if isinstance(result, torch.Tensor) or not hasattr(result, "__getitem__"):
        raise TypeError(f"carry takes item {key!r} of the result, which is a {type(result).__name__} (carry=\"x\" feeds the "
                        "whole result to x)")  # fmt: skip
    return result[key]


def _kept(result: object, how: Thing) -> object:
    """What is kept of a step's result until the last step. Copies, as later steps may write to its memory."""
    if how == "last":
        return None
    if how != "stack":
        return [*map(_kept, _items(result, how)[1], how)]
    leaves: Leaves = []
    shape = flatten(result, leaves)
    return unflatten(shape, iter([x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]))


def _joined(kept: Sequence[Thing], last: object, how: Thing) -> object:
    """The results of all steps as one."""
    if how == "last":
        return last
    if how == "stack":
        return _stacked([*kept, last])
    node, items = _items(last, how)
    columns = [[x[i] for x in kept] for i in range(len(how))]
    return build(node, [*map(_joined, columns, items, how)])


def _stacked(results: Sequence[object]) -> object:
    """Results of one structure: tensors along a new leading dimension, other values as a list.

    Raises:
        ValueError: they have different structures.
    """
    flat: list[tuple[Node | None, Leaves]] = []
    for result in results:
        leaves: Leaves = []
        flat.append((flatten(result, leaves), leaves))
    shape = flat[0][0]
    for step, (other, _) in enumerate(flat):
        if other != shape:
            raise ValueError(f'the result of step {step} has another structure than that of step 0 (results="last" returns the '
                             "last)")  # fmt: skip
    return unflatten(shape, iter([_column(list(xs)) for xs in zip(*(leaves for _, leaves in flat), strict=True)]))


def _column(values: Leaves) -> object:
    if all(isinstance(x, torch.Tensor) for x in values):
        return torch.stack(values)
    return None if all(x is None for x in values) else values


def _items(result: object, how: Sequence[object]) -> tuple[Node, Sequence[object]]:
    """The items of a result of which each has an own rule.

    Raises:
        TypeError: there are not as many.
    """
    parts = taken_apart(result)
    if parts is None or len(parts[1]) != len(how):
        raise TypeError(f"results={how!r} needs a result of {len(how)} items, not {type(result).__name__}")
    return Node(type(result), parts[0], ()), parts[1]
