"""Many sizes, few recordings: `shapes={"x": {0: [1, 2, 4, 8]}}`.

An argument whose size lies between two of the sizes that the user declared is padded with zeros up to the next one, and what
comes back is cut to the size that it would have had. That is right only where the padding changes nothing but the results'
sizes, which a mean over a batch, say, does not allow; so it is not believed, but tried, once for each size that comes: the call
runs padded with zeros, then padded with all sorts of numbers, both of which is taken back, and then runs live, which is the
answer. If these differ, such calls are recorded as they are, with their own sizes, and the reason is given.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from . import optimizers
from .devices import lock
from .errors import Refusal, RunsLive, Unrecordable
from .keys import NoSignature
from .observe import Observed, Stats, logger
from .options import Options, switched_off
from .progress import progress
from .reach import Reach
from .recorded import Recorded, counted, rebuilt
from .recorder import check, transaction
from .reliance import Grads, same
from .signature import Call, describe
from .trees import Node, flatten, unflatten
from .verify import State
from .watch import storage_id
from .within import Within, inside

__all__ = ["Padded"]

_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""How far a padded call's results may be from those of the call as it is, over their largest value: a matrix product of
another size adds up in another order, with TF32 where that is allowed."""

_KNOWN = 4096  # kinds of calls that are remembered
_MASK = "mask what is padded, or leave it out of shapes"


class _Sizes(NamedTuple):
    """One dimension of one parameter, and the sizes that are recorded."""

    name: str
    position: int
    dim: int
    sizes: tuple[int, ...]


class _Pad(NamedTuple):
    """An argument's dimension that has `size` and gets `to`; they may be equal."""

    of: _Sizes
    size: int
    to: int


_Cuts = tuple[tuple[tuple[int, int], ...], ...]
"""The results' dimensions that are cut: for each leaf pairs of a dimension and the size that it gets."""


class _TakenBack(Exception):
    """Ends a transaction whose effects are not wanted."""


class _Outcome:
    """What a call gave, and what it left."""

    def __init__(self, result: Any, left: dict[str, torch.Tensor]) -> None:
        leaves: list[Any] = []
        self.shape: Node | None = flatten(result, leaves)
        self.leaves = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves]
        self.storages = {storage_id(x) for x in leaves if isinstance(x, torch.Tensor) and x.layout is torch.strided}
        self.left = left


class Padded(Observed):
    """A recorded function, or what the calls of a recorded module go through, whose arguments are padded."""

    def __init__(self, function: Callable[..., Any], options: Options, recorded: Recorded[Any, Any] | None = None) -> None:
        self.recorded: Recorded[Any, Any] = Recorded(function, options) if recorded is None else recorded
        functools.update_wrapper(self, function, updated=())
        self.__wrapped__ = function
        self.options = options
        self._declared = _declared(function, options)
        self._known: dict[Any, _Cuts | Refusal] = {}
        self._bound: weakref.WeakKeyDictionary[Recorded[Any, Any], Padded] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<padded {self.recorded!r}>"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: each instance has recordings of its own."""
        if instance is None:
            return self
        recorded = self.recorded.__get__(instance, owner)
        if not isinstance(recorded, Recorded):
            return MethodType(self, instance)
        if recorded not in self._bound:
            self._bound[recorded] = Padded(recorded.__wrapped__, self.options, recorded)
        return self._bound[recorded]

    def __set_name__(self, owner: type, name: str) -> None:
        self.recorded.__set_name__(owner, name)

    def __reduce__(self) -> Any:
        return rebuilt(self, self.__wrapped__, self.options)

    def __deepcopy__(self, memo: Any) -> Padded:
        return Padded(copy.deepcopy(self.__wrapped__, memo), self.options)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or inside() or switched_off():
            return self.recorded(*args, **kwargs)
        pads = self._pads(args, kwargs)
        if all(pad.size == pad.to for pad in pads):
            return self.recorded(*args, **kwargs)
        padded = _padded(pads, args, kwargs)
        try:
            key = describe(*padded).key, tuple(pad.size for pad in pads)
        except NoSignature:
            return self.recorded(*args, **kwargs)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            known, result = self._try(pads, args, kwargs)
            self._known[key] = known
            if isinstance(known, Refusal):
                self._say(known)
            return result
        if isinstance(known, Refusal):
            return self.recorded(*args, **kwargs)
        return _cut(self.recorded(*padded[0], **padded[1]), known)

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record every size, largest first. See `phonograph.prepare`."""
        pads = self._pads(args, kwargs)
        together = list(dict.fromkeys(pad.of.sizes for pad in pads))  # equal sizes are those of one thing
        combinations = list(itertools.product(*(reversed(sizes) for sizes in together)))
        with progress(f"recording {self.recorded.name}", len(combinations), shown=sys.stderr.isatty()) as advance:
            for chosen in combinations:
                to = dict(zip(together, chosen, strict=True))
                resized = _padded([pad._replace(to=to[pad.of.sizes]) for pad in pads], args, kwargs)
                for _ in range(self.options.warmup + 1):
                    self.recorded(*resized[0], **resized[1])
                advance(1)

    def _pads(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[_Pad]:
        """What is padded in a call; nothing, if some size is larger than all that are declared."""
        pads = []
        for one in self._declared:
            t = kwargs[one.name] if one.name in kwargs else args[one.position] if one.position < len(args) else None
            if not isinstance(t, torch.Tensor) or t.dim() <= one.dim or t.layout is not torch.strided:
                continue
            size = t.size(one.dim)
            to = next((s for s in one.sizes if s >= size), None)
            if to is None or not size:
                return []
            pads.append(_Pad(one, size, to))
        return pads

    # -- trying

    def _try(self, pads: list[_Pad], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[_Cuts | Refusal, Any]:
        """Whether calls of this kind may be padded, and the result of this one, which runs live."""
        counters, function = counted(self.recorded), self.recorded.__wrapped__
        counters.calls += 1
        counters.live += 1
        try:
            call = describe(args, kwargs)
            reach = self.recorded.looked_at(call)
            check(reach, call, False)
        except (NoSignature, Refusal) as e:
            with Within(waits=True):
                return e if isinstance(e, Refusal) else Refusal(str(e)), function(*args, **kwargs)
        with lock, Within(waits=True), optimizers.recordable(reach.optimizers):
            try:
                zeros = self._tried(_padded(pads, args, kwargs), call, reach)
                others = self._tried(_padded(pads, args, kwargs, _all_sorts), call, reach)
            except Exception as e:
                return Refusal(f"raises {type(e).__name__} where {_said(pads)}", _MASK), function(*args, **kwargs)
            before = State(call, reach)
            result = function(*args, **kwargs)
            return _judged(pads, call, zeros, others, _Outcome(result, before.left())), result

    def _tried(self, padded: tuple[Any, Any], call: Call, reach: Reach) -> _Outcome:
        """What a padded call gives and leaves, all of which is taken back."""
        before = State(call, reach)
        found: list[_Outcome] = []
        try:
            with suppress(_TakenBack), transaction(reach, Grads([t for _, t in reach.tensors.values()], _none)):
                found.append(_Outcome(self.recorded.__wrapped__(*padded[0], **padded[1]), before.left()))
                raise _TakenBack
        finally:
            before.restore()
        return found[0]

    def _say(self, refusal: Refusal) -> None:
        name = self.recorded.name
        logger.info("%s is not padded: %s", name, refusal)
        first = counted(self.recorded).refuse(refusal.reason)
        if self.options.fallback == "error":
            raise Unrecordable(f"{name} cannot be padded: {refusal}")
        if first:
            warnings.warn(f"{name} is not padded, but recorded for each size: {refusal}", RunsLive, stacklevel=3)

    # -- for the observers

    def stats(self) -> Stats:
        return self.recorded.stats()

    def explain(self) -> str:
        refused = [known for known in self._known.values() if isinstance(known, Refusal)]
        sizes = [f"{one.name}, dimension {one.dim}: {', '.join(map(str, one.sizes))}" for one in self._declared]
        return "\n".join([self.recorded.explain(), *(f"padded: {size}" for size in sizes),
                          *dict.fromkeys(f"not padded: {refusal}" for refusal in refused)])  # fmt: skip

    def reset(self) -> None:
        self._known.clear()
        for mine in list(self._bound.values()):
            mine._known.clear()
        self.recorded.reset()


def _declared(function: Callable[..., Any], options: Options) -> list[_Sizes]:
    """The sizes that the user declared, by the places of the function's parameters.

    Raises:
        ValueError: there is no such parameter.
    """
    own = getattr(function, "__self__", None)
    if isinstance(own, torch.nn.Module) and getattr(function, "__func__", None) is not type(own).forward:
        function = own.forward  # what a module's call takes
    parameters = list(inspect.signature(function).parameters.values())
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    others = any(p.kind is p.VAR_KEYWORD for p in parameters)
    found = []
    for name, dims in options.shapes:
        if name not in names and name not in by_name and not others:
            raise ValueError(f"shapes names {name!r}, which is no parameter: {', '.join([*names, *sorted(by_name)])}")
        position = names.index(name) if name in names else sys.maxsize
        found += [_Sizes(name, position, dim, sizes) for dim, sizes in dims]
    return found


def _padded(
    pads: list[_Pad],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    stuffed: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The arguments with their padding: zeros, or for floating-point numbers what `stuffed` makes of them."""
    new_args, new_kwargs = list(args), dict(kwargs)
    for of, size, to in pads:
        place: Any = new_kwargs if of.name in new_kwargs else new_args
        at: Any = of.name if of.name in new_kwargs else of.position
        t = place[at]
        if to < size:
            place[at] = t.narrow(of.dim, 0, to)
        elif to > size:
            place[at] = F.pad(t, [*[0, 0] * (t.dim() - of.dim - 1), 0, to - size])
            if stuffed is not None and t.is_floating_point():
                place[at] = torch.cat([t, stuffed(place[at].detach().narrow(of.dim, size, to - size))], of.dim)
    return tuple(new_args), new_kwargs


def _all_sorts(t: torch.Tensor) -> torch.Tensor:
    """Numbers of both signs, and large ones: they show in a sum, and in the largest and smallest of many."""
    count = torch.arange(1, t.numel() + 1, device=t.device, dtype=torch.float32).reshape(t.shape)
    return ((count % 7 - 3.2) * (1 + count % 11) * 100).to(t.dtype)


def _cut(result: Any, cuts: _Cuts) -> Any:
    leaves: list[Any] = []
    shape = flatten(result, leaves)
    for i, cut in enumerate(cuts):
        for dim, size in cut:
            leaves[i] = leaves[i].narrow(dim, 0, size)
    return unflatten(shape, iter(leaves), result)


def _judged(pads: list[_Pad], call: Call, zeros: _Outcome, others: _Outcome, live: _Outcome) -> _Cuts | Refusal:
    """Where the results of padded calls have to be cut; or why a call must not be padded."""
    if not (zeros.shape == others.shape == live.shape and len(zeros.leaves) == len(others.leaves) == len(live.leaves)):
        return Refusal(f"gives a result of another structure where {_said(pads)}", _MASK)
    if any(storage_id(t) in live.storages for t in call.tensors):
        return Refusal("returns an argument, or a view of one, which cannot be padded", "return a clone of it")
    cuts = []
    for i, (padded, other, wanted) in enumerate(zip(zeros.leaves, others.leaves, live.leaves, strict=True)):
        cut: list[tuple[int, int]] = []
        if isinstance(wanted, torch.Tensor) and isinstance(padded, torch.Tensor) and isinstance(other, torch.Tensor):
            if padded.dim() != wanted.dim() or padded.shape != other.shape:
                return Refusal(f"gives another result {i} where {_said(pads)}", _MASK)
            for dim, (now, then) in enumerate(zip(wanted.shape, padded.shape, strict=True)):
                if now != then:
                    if not any((pad.size, pad.to) == (now, then) for pad in pads):
                        return Refusal(f"gives a result {i} of size {then} instead of {now} where {_said(pads)}", _MASK)
                    cut.append((dim, now))
        cuts.append(tuple(cut))
        (padded, other) = (_cut(x, (tuple(cut),)) for x in (padded, other))
        if not _close(padded, wanted) or not _equal(padded, other):
            return Refusal(f"gives another result {i} where {_said(pads)}", _MASK)
    for name in live.left.keys() | zeros.left.keys() | others.left.keys():
        padded, other, wanted = zeros.left.get(name), others.left.get(name), live.left.get(name)
        if not _close(padded, wanted) or not _equal(padded, other):
            return Refusal(f"leaves {name} another where {_said(pads)}", _MASK)
    return tuple(cuts)


def _none(_: torch.Tensor) -> None:
    """No contents outlive their tensor here: what is tried really runs."""


def _said(pads: list[_Pad]) -> str:
    return " and ".join(f"{p.of.name} is padded from {p.size} to {p.to}" for p in pads if p.size != p.to)


def _close(x: Any, y: Any) -> bool:
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)):
        return same(x, y)
    if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
        return False
    if x.dtype not in _CLOSE or not x.numel():
        return torch.equal(x, y)
    finite = y.isfinite()
    if not torch.equal(torch.where(finite, 0, x).nan_to_num(), torch.where(finite, 0, y).nan_to_num()):
        return False
    x, y = torch.where(finite, x, 0), torch.where(finite, y, 0)
    return bool((x - y).abs().max() <= _CLOSE[x.dtype] * y.abs().max())


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num())
    return same(x, y)
