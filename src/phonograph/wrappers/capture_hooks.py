"""Hooks around the calls in which a recorded function's code runs: warm-up calls and captures. No replay calls them.

    forward_pre ─► a live warm-up call; or a capture, and its first play ─► forward
    backward_pre ─► the backward of a warm-up call; or a warm-up or the capture of the recorded backward ─► backward

Hooks are neither captured nor watched, and may do what no recording can. `forward` also runs after a failed capture and the
live call in its place, so that it can undo the work of `forward_pre`.

A warm-up call keeps autograd's own graph. Its backward begins with the first node that made a result. It is over when every
node has run that passes gradients out of the call.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from .._torch.autograd import made_when, will_run
from .._torch.dynamic import Args, Kwargs, Thing
from .._torch.skipped_frames import passes_on
from ..autograd.backward import Backward
from ..call.signature import Call
from ..engine.making import BackwardKind
from ..engine.recorded import Recorded
from ..options import Options
from ..values.pytree import flatten

__all__ = ["CaptureHooks", "Hooked", "WarmUps"]

Hook = Callable[..., object]
Grads = tuple[object, ...]

_KINDS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
_WITH_KWARGS = ("forward_pre_hooks_with_kwargs", "forward_hooks_with_kwargs")


@dataclass(frozen=True)
class CaptureHooks:
    """Hooks of one callable. Each gets the callable first and returns None. One that takes a single argument gets only that."""

    owner: object
    forward_pre: tuple[Hook, ...] = ()
    """Called with all arguments, as a tuple and a dict."""
    forward: tuple[Hook, ...] = ()
    """Called with those and the result."""
    backward_pre: tuple[Hook, ...] = ()
    """Called with the gradients of the results that have a history; None for one that is not known yet."""
    backward: tuple[Hook, ...] = ()
    """Called with the gradients of the arguments that require one, and those of the results."""

    @classmethod
    def of(cls, owner: object, given: Mapping[str, Thing] | None) -> CaptureHooks:
        """Check hooks as Transformer Engine takes them: for each kind a dict of hooks by any name.

        Raises:
            TypeError: something is not the dict, or the function, that it should be.
            ValueError: there is no such kind.
        """
        given = {} if given is None else given
        if not isinstance(given, Mapping):
            raise TypeError(f"capture_time_hooks must have a dict or None for each callable, not {type(given).__name__}")
        if unknown := sorted(given.keys() - {*_KINDS, *_WITH_KWARGS}):
            raise ValueError(f"capture_time_hooks knows {', '.join(_KINDS + _WITH_KWARGS)}, not {', '.join(unknown)}")
        forward_pre, forward, backward_pre, backward = (_hooks(kind, given) for kind in _KINDS)
        return cls(owner, forward_pre, forward, backward_pre, backward)

    def call(self, hooks: Iterable[Hook], *args: object) -> None:
        for hook in hooks:
            if hook(self.owner, *args) is not None:
                name = getattr(hook, "__qualname__", repr(hook))
                raise RuntimeError(
                    f"capture_time_hooks must return None: {name} cannot replace arguments, results or gradients"
                )


def _hooks(kind: str, given: Mapping[str, Thing]) -> tuple[Hook, ...]:
    """The hooks of one kind, all to be called with keyword arguments where the kind knows them."""
    named, full = given.get(kind) or {}, given.get(f"{kind}_with_kwargs") or {}
    if not isinstance(named, Mapping) or not all(map(callable, named.values())):
        raise TypeError(f"capture_time_hooks: {kind} must be a dict of functions, not {named!r}")
    if kind.startswith("backward"):
        return tuple(map(_taking, named.values()))
    return tuple(hook if full and name in full else _taking(hook, _without_kwargs(hook)) for name, hook in named.items())


def _taking(hook: Hook, with_others: Hook | None = None) -> Hook:
    """A hook, called with the callable alone where no more than that must be given to it."""
    return _with_owner_alone(hook) if _takes_one(hook) else with_others or hook


def _takes_one(hook: Hook) -> bool:
    """Whether a function has one parameter that it needs, and no ``*args`` for others."""
    try:
        parameters = inspect.signature(hook).parameters.values()
    except (TypeError, ValueError):  # a function in C
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in positional if p.default is p.empty]
    return bool(positional) and len(needed) <= 1 and not any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _with_owner_alone(hook: Hook) -> Hook:
    return wraps(hook)(lambda owner, *_: hook(owner))


def _without_kwargs(hook: Hook) -> Hook:
    return wraps(hook)(lambda owner, args, kwargs, *result: hook(owner, args, *result))


class WarmUps:
    """The warm-up calls of several callables together: `before` is called before the first of them, `after` when each has
    had `count`; both at once if that is 0."""

    def __init__(self, callables: int = 0, count: int = 0, before: Hook | None = None, after: Hook | None = None) -> None:
        self._left = dict.fromkeys(range(callables), count) if count else {}
        self._before, self._after = before, after
        if not self._left:
            self.begin()
            self._finish()

    def begin(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before()

    def end(self, number: int) -> None:
        if number in self._left:
            self._left[number] -= 1
            if not self._left[number]:
                del self._left[number]
        if not self._left:
            self._finish()

    def _finish(self) -> None:
        after, self._after = self._after, None
        if after is not None:
            after()


class Hooked(Recorded[..., object]):
    """A recorded function with hooks. `number` is its place among those whose `warm_ups` are counted together."""

    _measures = False  # its hooks set up what the recording needs, and a live call might miss

    def __init__(
        self, function: Callable[..., object], options: Options, hooks: CaptureHooks, warm_ups: WarmUps, number: int
    ) -> None:
        self._hooks, self._warm_ups, self._number = hooks, warm_ups, number
        self._this_call = threading.local()
        super().__init__(function, options)

    @passes_on
    def __call__(self, /, *args: object, **kwargs: object) -> object:
        outer, self._this_call.runs = getattr(self._this_call, "runs", False), False
        try:
            result = super().__call__(*args, **kwargs)
            if self._this_call.runs:
                self._end(args, kwargs, result)
        finally:
            self._this_call.runs = outer
        return result

    def _begin(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self._this_call.runs = True
        self._hooks.call(self._hooks.forward_pre, args, kwargs)

    def _end(self, args: tuple[object, ...], kwargs: Mapping[str, object], result: object) -> None:
        self._hooks.call(self._hooks.forward, args, kwargs, result)

    def _warm_up(self, call: Call, args: Args, kwargs: Kwargs) -> object:
        self._warm_ups.begin()
        self._begin(args, kwargs)
        try:
            result = super()._warm_up(call, args, kwargs)
        finally:
            self._warm_ups.end(self._number)
        if self._hooks.backward_pre or self._hooks.backward:
            _LiveBackward(self._hooks, result, [t for t in call.tensors if _is_input(t)])
        return result

    def _record(self, call: Call, blocked: int, unplayed: ExitStack, *, apart: bool) -> Thing:
        self._begin(*call.like)
        return super()._record(call, blocked, unplayed, apart=apart)

    def _backward_kind(self) -> BackwardKind:
        hooks = self._hooks
        return lambda function, options: _HookedBackward(function, options, hooks, WarmUps(), 0)


class _HookedBackward(Hooked):
    """The recorded backward of a recorded call: gradients of results in, of arguments and then of parameters out."""

    def _begin(self, args: Args, kwargs: Mapping[str, object]) -> None:
        self._this_call.runs = True
        self._hooks.call(self._hooks.backward_pre, self._backward.gradients(args))

    def _end(self, args: Args, kwargs: Mapping[str, object], result: Thing) -> None:
        (found, _), backward = result, self._backward
        of_arguments = backward.graph.sums(found)[: len(backward.graph.arguments)]
        self._hooks.call(self._hooks.backward, tuple(of_arguments), backward.gradients(args))

    @property
    def _backward(self) -> Backward:
        function: Thing = self._function
        return function  # type: ignore[no-any-return]


def _is_input(t: torch.Tensor) -> bool:
    """Whether an argument is one that gradients are returned for; a parameter is state."""
    return t.requires_grad and not isinstance(t, torch.nn.Parameter)


class _LiveBackward:
    """The first backward of a warm-up call: tells the hooks when it begins and ends.

    Nodes of the graph have hooks of ours, and must not be held by them: a graph that never runs backward would hold itself, out
    of the garbage collector's sight. So a hook knows only such nodes as were made before its own, which autograd runs after it.
    """

    def __init__(self, hooks: CaptureHooks, result: object, inputs: Sequence[torch.Tensor]) -> None:
        leaves: list[Any] = []
        flatten(result, leaves)
        ends = [_edge(t) for t in leaves if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        starts = {_edge(t): i for i, t in enumerate(inputs)}
        self._hooks = hooks
        self._of_results: list[Any] = [None] * len(ends)
        self._of_arguments: list[Any] = [None] * len(inputs)
        self._due: set[int] = set()  # nodes that run in this backward
        self._ran: set[int] = set()
        within = _between([node for node, _ in ends], {node for node, _ in starts})
        leaving = {n for n in within if any(following not in within for following, _ in n.next_functions)}
        watched = sorted({*(node for node, _ in ends if node in within), *leaving}, key=made_when)
        self._handles = []
        for k, node in enumerate(watched):
            results = [(i, number) for i, (end, number) in enumerate(ends) if end is node]
            if results:
                before = list(enumerate(watched[:k]))
                self._handles.append(node.register_prehook(partial(self._enter, k, results, before, node not in leaving)))
            if node in leaving:
                arguments = [(at, starts[edge]) for at, edge in enumerate(node.next_functions) if edge in starts]
                self._handles.append(node.register_hook(partial(self._leave, k, arguments)))

    def _enter(
        self, k: int, results: list[tuple[int, int]], before: list[tuple[int, Node]], is_all: bool, grads: Sequence[object]
    ) -> None:
        for i, number in results:
            self._of_results[i] = grads[number]
        begins = not self._due
        self._due |= {k, *(j for j, node in before if will_run(node))}
        if begins:
            self._hooks.call(self._hooks.backward_pre, tuple(self._of_results))
        if is_all:
            self._has_run(k)

    def _leave(self, k: int, arguments: list[tuple[int, int]], grads: Sequence[object], _: object) -> None:
        for at, i in arguments:
            if grads[at] is not None:
                before = self._of_arguments[i]
                self._of_arguments[i] = grads[at] if before is None else before + grads[at]
        self._has_run(k)

    def _has_run(self, k: int) -> None:
        self._ran.add(k)
        if self._due and self._due <= self._ran:
            for handle in self._handles:
                handle.remove()
            self._hooks.call(self._hooks.backward, tuple(self._of_arguments), tuple(self._of_results))


def _edge(t: torch.Tensor) -> tuple[Node, int]:
    node, number = get_gradient_edge(t)[:2]
    return node, number


def _between(ends: Iterable[Node], starts: set[Node]) -> set[Node]:
    """The nodes that gradients pass on their way from results to arguments and parameters."""
    found: set[Node] = set()
    work = list(ends)
    while work:
        node = work.pop()
        if node not in found and node not in starts and not hasattr(node, "variable"):
            found.add(node)
            work += [following for following, _ in node.next_functions if following is not None]
    return found
