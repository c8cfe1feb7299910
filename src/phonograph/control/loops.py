"""`while_loop` and `repeat`: loops over a state of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from operator import index as as_index
from typing import TypeVar, cast

import torch

from .._torch.dynamic import Thing
from ..capture.control_flow import ControlFlow
from ..errors import Refusal
from .branches import callables, cond
from .results import Tree, apart, number_of, watch_here

__all__ = ["repeat", "while_loop"]

S = TypeVar("S")


def while_loop(
    cond_fn: Callable[..., Thing], body_fn: Callable[..., S], state: S, *, max_iterations: int | None = None
) -> S:  # fmt: skip
    """Loop over a state while a tensor is true.

    Live this is ``while cond_fn(*state): state = body_fn(*state)``. A recording holds both functions once, and each replay runs
    as many iterations as are needed without the host: on CUDA as a conditional node of the graph.

    Args:
        cond_fn: function of the state that returns a tensor of one element on the call's device.
        body_fn: function of the state that returns the next one: same structure, shapes, dtypes and devices. It may write
            tensors in place and use tensors of its closure.
        state: tuple or list, unpacked into arguments; or another tree of tensors, passed as one argument.
        max_iterations: bound of the loop. It is required where gradients are wanted: a recording then holds so many copies of
            the body, each with what autograd saves.

    Returns:
        The last state. Its tensors are new, also after no iteration.

    Raises:
        RuntimeError: `cond_fn` returns a tensor of several elements.
        TypeError: one of the functions is not callable.
    """
    callables("pg.while_loop", {"cond_fn": cond_fn, "body_fn": body_fn})
    first = apart(state, Tree.of(state).tensors)
    watch = watch_here()
    if watch is None:
        return _live(cond_fn, body_fn, first, max_iterations)
    if max_iterations is None:
        return cast("S", _recorded(watch, cond_fn, body_fn, first))
    if torch.is_grad_enabled():
        return _branches(cond_fn, body_fn, first, max_iterations)

    def goes_on(i: torch.Tensor, inner: object) -> Thing:
        return torch.logical_and(_given(cond_fn, inner), i < max_iterations)

    return _counted(watch, goes_on, body_fn, first)


def repeat(n: int | torch.Tensor, body_fn: Callable[..., S], state: S) -> S:
    """Loop over a state `n` times.

    Live this is ``for _ in range(n): state = body_fn(*state)``. A recording holds the function once; where gradients are
    wanted, `n` times.

    Args:
        n: number of iterations: an int, or an integer tensor of one element on the call's device.
        body_fn: function of the state that returns the next one, as in `while_loop`.
        state: tuple or list, unpacked into arguments; or another tree of tensors, passed as one argument.

    Returns:
        The last state. Its tensors are new, also after no iteration.

    Raises:
        RuntimeError: `n` is a tensor of several elements.
        TypeError: `n` is no integer, or `body_fn` is not callable.
    """
    callables("pg.repeat", {"body_fn": body_fn})
    if isinstance(n, torch.Tensor) and (n.is_floating_point() or n.is_complex()):
        raise TypeError(f"pg.repeat: n must be of an integer type, not {n.dtype}")
    times: Thing = n if isinstance(n, torch.Tensor) else as_index(n)
    first = apart(state, Tree.of(state).tensors)
    watch = watch_here()
    if watch is None:
        return _turns(number_of(times, "pg.repeat: n") if isinstance(times, torch.Tensor) else times, body_fn, first)
    if torch.is_grad_enabled() and isinstance(times, int):  # after one turn it shows whether gradients are wanted
        first, times = Tree.of(_turns(min(times, 1), body_fn, first)), times - 1
        if any(t.requires_grad for t in first.tensors):
            return _turns(times, body_fn, first)
    return _counted(watch, lambda i, _: i < times, body_fn, first)


def _turns(n: int, body_fn: Callable[..., S], state: Tree) -> S:
    for _ in range(n):
        state = apart(_given(body_fn, state.whole(state.tensors)), ())
    return cast("S", state.whole(state.tensors))


def _counted(watch: ControlFlow, cond_fn: Callable[..., Thing], body_fn: Callable[..., S], first: Tree) -> S:
    """A loop whose condition is given how many turns it has made as well."""

    def turn(i: torch.Tensor, inner: object) -> tuple[torch.Tensor, object]:
        return i + 1, _given(body_fn, inner)

    done = torch.zeros((), dtype=torch.int64, device=watch.device)
    return cast("S", _recorded(watch, cond_fn, turn, Tree.of((done, first.whole(first.tensors))))[1])


def _branches(cond_fn: Callable[..., Thing], body_fn: Callable[..., S], first: Tree, most: int) -> S:
    """A loop as so many branches, each of which is taken where the one before it was."""

    def turn(state: S, _: object) -> tuple[S, Thing]:
        new = _given(body_fn, state)
        return new, _given(cond_fn, new)

    state = cast("S", first.whole(first.tensors))
    goes_on = _given(cond_fn, state)
    for _ in range(most):
        state, goes_on = cond(goes_on, turn, lambda *last: last, state, goes_on)
    return state


def _given(function: Callable[..., Thing], state: Thing) -> Thing:
    return function(*state) if type(state) in (tuple, list) else function(state)


def _live(cond_fn: Callable[..., Thing], body_fn: Callable[..., S], state: Tree, most: int | None) -> S:
    whole: S = state.whole(state.tensors)
    for i in count():
        goes_on = _given(cond_fn, whole)
        if (
            not (number_of(goes_on, "pg.while_loop: the condition") if isinstance(goes_on, torch.Tensor) else goes_on)
            or i == most
        ):
            break
        found = apart(_given(body_fn, whole), ())
        whole = found.whole(found.tensors)
    return whole


def _recorded(watch: ControlFlow, cond_fn: Callable[..., Thing], body_fn: Callable[..., Thing], first: Tree) -> Thing:
    def goes_on(state: Sequence[torch.Tensor]) -> torch.Tensor:
        found = _given(cond_fn, first.whole(state))
        if not isinstance(found, torch.Tensor):
            raise watch.located(Refusal("loops by a condition that is no tensor", "give a tensor"))
        return found

    def turn(state: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given = _given(body_fn, first.whole(state))
        found = apart(given, ())
        if not first.alike(found):
            alone = isinstance(given, torch.Tensor) and len(first.tensors) == 1
            remedy = "return a tuple of one, (x,), as the state is" if alone else "keep in tensors what changes"
            raise watch.located(Refusal("returns another state from a loop's body than it was given: of another structure, or "
                                        "with other values that are no tensors", remedy))  # fmt: skip
        return found.tensors

    roots = [("cond_fn", cond_fn), ("body_fn", body_fn)]
    return first.whole(watch.loop(goes_on, turn, first.tensors, roots))
