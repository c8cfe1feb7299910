"""Whether a value that a place holds now is what it held before: to a program, the two must not be told apart."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from types import FunctionType

import torch

from .._torch.dynamic import Thing
from ..state.rng import share_state
from ..values.keys import NoSignature, plain_key

__all__ = ["all_same", "equal", "may_stand_for", "same"]


def same(a: Thing, b: Thing) -> bool:
    """Whether two held values are the same to a program: one object, equal plain values of one type, or functions that the same
    line has made and that hold nothing."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is FunctionType:
        return a.__code__ is b.__code__ and a.__globals__ is b.__globals__ and not (_holds(a) or _holds(b))
    if type(a) is torch.Generator:
        return share_state(a, b)
    if type(a) in (list, tuple):
        return all_same(a, b)
    if type(a) is dict:
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    try:
        return bool(plain_key(a) == plain_key(b))
    except NoSignature:
        return False


def _holds(f: FunctionType) -> bool:
    """Whether there is more to a function than its code."""
    return any((f.__closure__, f.__defaults__, f.__kwdefaults__, f.__dict__))


def all_same(old: Sequence[object], now: Sequence[object]) -> bool:
    return len(old) == len(now) and (all(map(is_, old, now)) or all(map(same, old, now)))


def equal(a: Thing, b: Thing) -> bool:
    """Whether one value may stand for the other from now on: equal, and nothing that can change by itself."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, (list, dict, set)):
        return False
    return (type(a) is not tuple or (len(a) == len(b) and all(map(equal, a, b)))) and same(a, b)


def may_stand_for(old: Thing, now: Thing, containers: list[tuple[object, object]]) -> bool:
    """Whether one value is equal to another, down to what its containers hold; adds the containers that are not the same to
    `containers`, with those that stand there now, inner ones first."""
    if old is now:
        return True
    kind = type(old)
    if kind is not type(now):
        return False
    if kind in (list, tuple):
        alike = len(old) == len(now) and all(may_stand_for(a, b, containers) for a, b in zip(old, now, strict=True))
    elif kind is dict:
        alike = len(old) == len(now) and all(map(same, old, now))
        alike = alike and all(may_stand_for(a, b, containers) for a, b in zip(old.values(), now.values(), strict=True))
    else:
        alike = same(old, now)
    if alike and kind in (list, dict, set):
        containers.append((old, now))
    return alike
