"""The options of `pg.record`, checked once, where the user wrote them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from inspect import Parameter, Signature
from typing import Any, Literal, get_type_hints

import torch

from ._torch.operators import OpOverload, OpOverloadPacket

__all__ = ["Options", "at_least", "did_you_mean", "overloads", "parameters", "switched_off", "unknown_parameter"]

_OURS = {"ours": True}  # what is set by us, and no option of the user's
_OF_RECORD = {"taker": "record"}  # what no other function takes


@dataclass(frozen=True)
class Options:
    """See `phonograph.record` for what each one does."""

    warmup: int = 1
    fallback: Literal["auto", "live", "split", "error"] = "auto"
    outputs: Literal["keep", "borrow"] = "keep"
    verify: int = 0
    audit: int = 4096
    max_recordings: int = 16
    max_bytes: int | None = None
    name: str | None = None
    keep: Literal["pays", "always"] = "pays"
    split_at: Any = ()
    """After the check: names of overloads, which can be pickled."""
    shapes: Any = ()
    """After the check: pairs of a parameter's name and its dimensions, which are pairs of a number and sizes."""
    steps: int | None = field(default=None, metadata=_OF_RECORD)
    carry: Any = field(default=(), metadata=_OF_RECORD)
    """After the check: pairs of a parameter's name and the key of the item that feeds it (None: the whole result)."""
    shared: Any = field(default=(), metadata=_OF_RECORD)
    """After the check: names of parameters."""
    results: Any = field(default="stack", metadata=_OF_RECORD)
    """After the check: "stack" or "last", or a tuple of these, nested as the result is."""
    edges: Literal["captured", "true"] = field(default="captured", metadata=_OF_RECORD)
    takes_turns: bool = field(default=False, metadata=_OURS)
    """Set by a schedule: several forwards will wait for their backwards at the same time."""
    is_part: bool = field(default=False, metadata=_OURS)
    """Set by the backend: of a graph, and measured by it where no gradients are wanted."""
    live_backward: bool = field(default=False, metadata=_OURS)
    """Set by the backend: backwards outside of the call are not recorded."""

    @classmethod
    def given(cls, taker: str, options: Mapping[str, Any], **ours: Any) -> Options:
        """What the user has given to a function, the `taker`.

        Raises:
            TypeError: there is no such option.
        """
        known = _users(taker)
        for name in options.keys() - set(known):
            hint = did_you_mean(name, known) or f"; there are: {', '.join(known)}"
            raise TypeError(f"{taker}() got an unexpected keyword argument {name!r}{hint}")
        chosen = {name: value for name, value in options.items() if name != "shapes" or value is not None}
        return cls(**{**ours, **chosen})

    def __post_init__(self) -> None:
        at_least("warmup", self.warmup, 0)
        at_least("verify", self.verify, 0)
        at_least("audit", self.audit, 0)
        at_least("max_recordings", self.max_recordings, 1)
        if self.max_bytes is not None:
            at_least("max_bytes", self.max_bytes, 0)
        _one_of("fallback", self.fallback, ("auto", "live", "split", "error"))
        _one_of("outputs", self.outputs, ("keep", "borrow"))
        _one_of("keep", self.keep, ("pays", "always"))
        _one_of("edges", self.edges, ("captured", "true"))
        if isinstance(self.shapes, Mapping):
            object.__setattr__(self, "shapes", tuple((name, _sizes(name, dims)) for name, dims in self.shapes.items()))
        elif not isinstance(self.shapes, tuple) or not all(isinstance(x, tuple) and len(x) == 2 for x in self.shapes):
            raise TypeError(_LIKE)
        self._check_steps()
        if self.name is not None and not isinstance(self.name, str):
            raise TypeError(f"name must be a str, not {type(self.name).__name__}")
        if isinstance(self.split_at, (str, bytes)) or not isinstance(self.split_at, Iterable):
            raise TypeError(f"split_at must be a list of operators, not {type(self.split_at).__name__}")
        if self.split_at and self.fallback != "split":
            raise ValueError('split_at needs fallback="split"')
        names = {f"{x._schema.name}.{x._overloadname}" for one in self.split_at for x in overloads(one)}
        object.__setattr__(self, "split_at", frozenset(names))

    def cuts(self, *, measured: bool) -> bool:
        """Whether calls are cut into segments where something needs the host: by ``"auto"`` only those that can be `measured`,
        with and without cuts."""
        whole = self.verify or self.shapes or self.is_part  # compared with live calls, padded, or measured by somebody else
        return self.fallback == "split" or (self.fallback == "auto" and measured and not whole)

    def _check_steps(self) -> None:
        """Check what says how a call of several steps is put together."""
        object.__setattr__(self, "carry", _carried(self.carry))
        object.__setattr__(self, "shared", _names("shared", self.shared))
        object.__setattr__(self, "results", _kept(self.results))
        if self.steps is not None:
            at_least("steps", self.steps, 1)
        elif self.carry or self.shared or self.results != "stack":
            given = "carry" if self.carry else "shared" if self.shared else "results"
            raise ValueError(f"{given} needs steps")
        if self.steps is not None and self.shapes:
            raise ValueError("steps and shapes cannot be given together")
        both = {name for name, _ in self.carry} & {*self.shared}
        if both:
            raise ValueError(f"carry and shared both name {min(both)!r}")


def _users(taker: str) -> list[str]:
    """The options that a function takes."""
    return [
        each.name for each in fields(Options) if not each.metadata.get("ours") and each.metadata.get("taker", taker) == taker
    ]


def parameters(*first: Parameter) -> Signature:
    """The signature of a function that takes these, and the options by keyword: for `help`, and for editors."""
    kinds, defaults = get_type_hints(Options), {each.name: each.default for each in fields(Options)}
    defaults["shapes"] = None
    by_name = [Parameter(n, Parameter.KEYWORD_ONLY, default=defaults[n], annotation=kinds[n]) for n in _users("record")]
    return Signature([*first, *by_name])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is unknown: ". Did you mean 'warmup'?", or "" where none is like it."""
    like = get_close_matches(name, list(known), n=1)
    return f". Did you mean {like[0]!r}?" if like else ""


def at_least(name: str, value: object, least: int) -> None:
    """Check an option that is a number of something."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


_LIKE = 'shapes must be like {"x": {0: [1, 2, 4, 8]}}: sizes by dimension by parameter'


def _sizes(name: object, dims: object) -> tuple[tuple[int, tuple[int, ...]], ...]:
    if not isinstance(name, str) or not isinstance(dims, Mapping):
        raise TypeError(_LIKE)
    found = []
    for dim, given in dims.items():
        at_least(f"a dimension of {name} in shapes", dim, 0)
        if not isinstance(given, Iterable) or isinstance(given, (str, bytes, torch.Tensor)):
            raise TypeError(_LIKE)
        sizes = tuple(given)
        for size in sizes:
            at_least(f"a size of {name} in shapes", size, 1)
        if not sizes:
            raise ValueError(f"shapes gives no sizes for dimension {dim} of {name}")
        found.append((dim, tuple(sorted(set(sizes)))))
    return tuple(found)


def _names(option: str, given: object) -> tuple[str, ...]:
    """Names of parameters: one, or several."""
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{option} must be the name of a parameter, or a list of names, not {given!r}")
    return names


def _carried(given: object) -> tuple[tuple[str, object], ...]:
    """Which parameter is fed from which item of the result: None for the whole, or an item's key."""
    if isinstance(given, str):
        return ((given, None),)
    if isinstance(given, Mapping):
        given = tuple(given.items())
    if isinstance(given, tuple) and given and all(isinstance(x, tuple) and len(x) == 2 for x in given):
        _names("carry", [name for name, _ in given])
        return given
    return tuple((name, i) for i, name in enumerate(_names("carry", given)))


def _kept(given: object) -> object:
    """Which results of the steps are returned."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(map(_kept, given))
    if given not in ("stack", "last"):
        raise ValueError(f"results must be 'stack' or 'last', or one of these for each item of the result, not {given!r}")
    return given


def unknown_parameter(option: str, name: str, known: Iterable[str]) -> ValueError:
    """The error that an option names what is no parameter."""
    there = ", ".join(dict.fromkeys(known)) or "none"
    return ValueError(f"{option} names {name!r}, which is no parameter; there are: {there}")


def overloads(operator: object) -> list[OpOverload]:
    """What an operator's name stands for: all overloads, or one (``aten::sort.stable``)."""
    if isinstance(operator, OpOverload):
        return [operator]
    if isinstance(operator, OpOverloadPacket):
        return [getattr(operator, name) for name in operator.overloads()]
    if not isinstance(operator, str) or "::" not in operator:
        raise TypeError(f"split_at takes operators: torch.ops.aten.sort, or 'aten::sort', not {operator!r}")
    library, name = operator.split("::", 1)
    found: object = getattr(torch.ops, library)
    try:
        for part in name.split(".", 1):
            found = getattr(found, part)
    except AttributeError:
        raise ValueError(f"split_at: there is no operator {operator}") from None
    return overloads(found)


_environment = getattr(os.environ, "_data", None)  # os.environ decodes at each look: 0.7 us against 0.04
_NAME = os.environ.encodekey("PHONOGRAPH") if _environment is not None else None


def switched_off() -> bool:
    """Whether ``PHONOGRAPH=off`` asks for a pass-through."""
    if _environment is not None and _NAME not in _environment:
        return False
    return os.environ.get("PHONOGRAPH", "").lower() in ("off", "0", "false")
