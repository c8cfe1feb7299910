"""Where the operators of a captured call come from: the module that calls each.

A replay runs no Python code, so that a profiler sees kernels, and not whose they are. The capture has run that code. Then, for
each operator, the innermost module is looked up whose call goes on, or the optimizer whose step does, on the stack of Python's
frames.

In a backward there are no such frames, but autograd's nodes, which are numbered as they are made. So for each operator of the
forward the number is noted that autograd has come to; whose a node's number is, is then known, and with it whose the operators
are that the node calls. (Each thread has numbers of its own. Where two threads have made nodes of one number, nobody is named.)
What adds a gradient up belongs to the parameter's module.

What is launched without an operator, by compiled code for instance, has no name here: a wrong one would be worse.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from operator import itemgetter
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch.nn import Module

from .._torch.autograd import backward_id, made_when, next_number, running_node
from .._torch.modules import at_work_in
from ..guards.reachable import Reach
from ..python.identity import identity
from ..python.origin import is_users

__all__ = ["ARGUMENTS", "LINE", "MODULE", "NOWHERE", "OPTIMIZER", "RESULTS", "Origin", "Origins"]

ARGUMENTS, RESULTS = "arguments copied in", "results copied out"


MODULE, OPTIMIZER, LINE, NOWHERE = "module", "optimizer", "line", ""


class Origin(NamedTuple):
    """Of what one operator has put into a recording."""

    operator: str
    """`aten::addmm`; "" for what is launched without one."""
    kind: str
    """Of the place: `MODULE`, `OPTIMIZER`, `LINE` or `NOWHERE`."""
    place: str
    """`model.encoder.0`; `AdamW.step`; `train.py:31`, the line of the user's code; "" if it is unknown."""
    backward: bool = False


class Whose(NamedTuple):
    """A module or parameter by its identity, or another place (then the identity is 0)."""

    key: int
    kind: str
    name: str
    """A module's class, or the place."""


NOBODY = Whose(0, NOWHERE, "")
_OF_LEAVES = 1 << 63  # numbers of the nodes that add up gradients, which are called as soon as they can be


class _Numbers:
    """Whose operators had come when autograd's next number, of one thread, was this one."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._ends: list[int] = []
        self._whose: list[Whose] = []

    def note(self, following: int, whose: Whose) -> None:
        if not self._ends or following > self._ends[-1]:
            self._ends.append(following)
            self._whose.append(whose)

    def of(self, number: int) -> Whose | None:
        """Whose node has this number; None if none of this call's."""
        at = bisect_right(self._ends, number)
        return self._whose[at] if number >= self._first and at < len(self._ends) else None


class Origins:
    """Those of one call, in order, for each of its segments: up to which number of what was captured they go."""

    def __init__(self) -> None:
        self.wanted = True
        """Whether somebody will ask for names. (Without, it is only known what has an operator.)"""
        self._segments: list[list[tuple[int, tuple[str, Whose, bool]]]] = [[]]
        self._numbers: dict[int, _Numbers] = {}
        self._forward: Origins | None = None
        self._names: dict[int, str] = {}
        self._last: dict[int, Whose] = {}
        self._node = -1, NOBODY  # the number of the last node that called, and whose that is

    def follows(self, other: Origins) -> None:
        """This call is the backward of that one."""
        self._forward = other

    def cut(self) -> None:
        """A segment ends."""
        self._segments.append([])

    def note(self, operator: str, begins: int, ends: int, frame: FrameType, outermost: CodeType | None) -> None:
        """An operator, called in this frame, has captured what comes from `begins` to `ends`."""
        whose, backward = self._whose(frame, outermost) if self.wanted else (NOBODY, False)
        segment = self._segments[-1]
        done = segment[-1][0] if segment else 0
        if begins > done:
            segment.append((begins, ("", NOBODY if segment else Whose(0, NOWHERE, ARGUMENTS), False)))
        if ends > max(begins, done):
            segment.append((ends, (operator, whose, backward)))

    def unnamed(self, captured: int) -> list[range]:
        """What the last segment has captured without an operator, where it has come to this number."""
        done, found = 0, []
        for end, (operator, *_) in (*self._segments[-1], (captured, ("",))):
            if not operator:
                found.append(range(done, end))
            done = end
        return found

    def _whose(self, frame: FrameType, outermost: CodeType | None) -> tuple[Whose, bool]:
        thread, node = threading.get_ident(), running_node()
        found, of_user = at_work_in(frame, outermost, is_users)
        within = node is not None or backward_id() != -1
        if found is None and within:
            whose = self._last.get(thread, NOBODY) if node is None else self._of_node(node)
            self._last[thread] = whose
            return whose, True
        if isinstance(found, Module):
            whose = Whose(identity(found), MODULE, type(found).__name__)
        elif found is not None:
            whose = Whose(0, OPTIMIZER, found)
        else:
            whose = Whose(0, LINE, _line(of_user)) if of_user is not None else NOBODY
        following = next_number()
        numbers = self._numbers.get(thread)
        if numbers is None:
            numbers = self._numbers[thread] = _Numbers(following - 1)
        numbers.note(following, whose)
        return whose, False

    def _of_node(self, node: torch.autograd.graph.Node) -> Whose:
        number = made_when(node)
        if not 0 <= number < _OF_LEAVES:
            leaf = getattr(node, "variable", None)
            return Whose(identity(leaf), MODULE, "") if leaf is not None else NOBODY
        known, whose_is = self._node  # (another thread may put another there)
        if number == known:  # as for each operator of a node's after the first
            return whose_is
        found: set[Whose] = set()
        for one in (self, self._forward):
            for numbers in one._numbers.values() if one is not None else ():
                if (whose := numbers.of(number)) is not None:
                    found.add(whose)
        whose_is = found.pop() if len(found) == 1 else NOBODY
        self._node = number, whose_is
        return whose_is

    def named(self, reach: Reach) -> tuple[tuple[tuple[int, Origin], ...], ...]:
        """The same with names, and none of the objects: one row for each segment."""
        self._names = names = dict(_names(reach)) | (self._forward._names if self._forward is not None else {})

        def origin(operator: str, whose: Whose, backward: bool) -> Origin:
            place = names.get(whose.key, whose.name)
            made = Origin(operator, whose.kind if place else NOWHERE, place, backward)
            return known.setdefault(made, made)

        known: dict[Origin, Origin] = {}
        rows = ([(end, origin(*what)) for end, what in segment] for segment in self._segments)
        return tuple(tuple([*run][-1] for _, run in groupby(row, itemgetter(1))) for row in rows)


_base_name = cache(os.path.basename)


def _line(frame: FrameType) -> str:
    return f"{_base_name(frame.f_code.co_filename)}:{frame.f_lineno}"


def _names(reach: Reach) -> Iterator[tuple[int, str]]:
    """Names of the modules in reach, and of those that have these parameters: as the function itself would get at them."""
    inner = {identity(child) for module in reach.modules for child in module._modules.values() if child is not None}
    for root in (module for module in reach.modules if identity(module) not in inner):
        yield from _within(root, reach.names[identity(root)], set())


def _within(module: Module, name: str, seen: set[int]) -> Iterator[tuple[int, str]]:
    if identity(module) in seen:  # it is there under two names: the first one counts
        return
    seen.add(identity(module))
    yield identity(module), name
    for t in module._parameters.values():
        if t is not None:
            yield identity(t), name
    for path, child in module._modules.items():
        if child is not None:
            yield from _within(child, f"{name}.{path}", seen)
