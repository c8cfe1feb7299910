"""Hooks of tensors that get no gradient in a backward.

Autograd comes by at all that a node of a recorded call leads to, also where it has nothing to give; in eager it would not. So
hooks there hear of it only if a gradient arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial

import torch
from torch.autograd.graph import Node

from .._torch.autograd import backward_id, waits_for_all, when_backward_ends, will_run
from .._torch.dynamic import Private
from ..python.identity import identity

__all__ = ["keep_quiet"]

_quiet: set[tuple[int, int]] = set()  # backwards, and parameters that are kept quiet in them


def keep_quiet(nodes: list[Node | None]) -> None:
    """Those tensors to which these nodes lead get no gradient: their hooks must not hear of it."""
    leaves = [leaf for node in nodes if (leaf := getattr(node, "variable", None)) is not None]
    hooked = [t for t in leaves if t._backward_hooks or getattr(t, "_post_accumulate_grad_hooks", None)]
    for t in hooked:
        _keep_quiet(t, {n for n, hook in (t._backward_hooks or {}).items() if _counts_on(hook, nodes)})


def _counts_on(hook: object, nodes: list[Node | None]) -> bool:
    """Whether this hook is one of several that count how often autograd comes by (`register_multi_grad_hook`), and some of the
    others hear of a gradient: to none of these nodes."""
    waiting = waits_for_all(hook)
    return waiting is not None and any(node not in nodes and will_run(node) for node in waiting if node is not None)


def _keep_quiet(p: torch.Tensor, but: Set[int]) -> None:
    """Until the running backward ends, hooks of this parameter (`but` these) hear of it only if a gradient arrives: autograd
    comes by without one, and in eager it would not."""
    key = backward_id(), identity(p)
    if key in _quiet:
        return
    _quiet.add(key)
    when_backward_ends(partial(_quiet.discard, key))
    given: list[bool] = []
    frozen = not p.requires_grad  # since the forward: then torch takes no hook
    p.requires_grad_()
    asks = p.register_hook(lambda grad: given.append(grad is not None))
    p.requires_grad_(not frozen)
    both: tuple[Private, Private] = p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None)
    for hooks in both:
        own = {key: hook for key, hook in (hooks or {}).items() if key != asks.id and key not in but}
        if own:
            hooks.update({key: partial(_if_given, given, hook, hooks is p._backward_hooks) for key, hook in own.items()})
            when_backward_ends(partial(_put_back, hooks, own))
    when_backward_ends(asks.remove)


def _if_given(given: list[bool], hook: Callable[[torch.Tensor], object], before: bool, value: Private) -> object:
    arrived = value is not None if before else given[-1:] == [True]
    return hook(value) if arrived else None


def _put_back(hooks: dict[int, object], own: dict[int, object]) -> None:
    hooks.update({key: hook for key, hook in own.items() if key in hooks})
