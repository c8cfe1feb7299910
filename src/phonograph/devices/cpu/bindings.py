"""How a replay calls its operators: by the shortest way from Python to the very kernel that was noted.

`torch.ops` converts arguments by the operator's schema, each time anew. The bindings that PyTorch generates (`torch.mm`,
`Tensor.add_`) know the types of theirs, which saves 0.3 to 1.2 us a call (AMD EPYC, torch 2.13): a tenth of a small
training step. But a binding chooses the overload by rules of its own, so none is trusted: it is called once under a mode
that hears what arrives at the dispatcher and executes nothing. If that is the noted overload with the noted arguments,
and nothing else, the same kernel runs with the same arguments; otherwise the replay calls the overload itself.

Asked are only operators that return what they wrote, because those can be answered without running them. A binding chooses by
types alone, so that what was found for one call holds for all whose arguments are of these types; and numbers among the
arguments may be replaced afterwards by others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from ..._torch.dynamic import Args, Kwargs, Private
from ..._torch.modes import TorchDispatchMode
from ..._torch.operators import OpOverload, bindings
from ...guards.sameness import same
from ...python.identity import identity

__all__ = ["spelled"]


def spelled(calls: Sequence[partial[object]]) -> list[partial[object]]:
    """The same calls; those of an overload (`torch.ops.aten.add_.Tensor`) in its shortest spelling. Executes nothing.

    To be called with the dispatch keys that a replay has. About 10 us a call.
    """
    with _Listener() as listener:  # type: ignore[no-untyped-call]
        return [_shortest(call, listener) if isinstance(call.func, OpOverload) else call for call in calls]


_found: dict[tuple[object, ...], Private] = {}  # by an overload's identity, and types


def _shortest(call: partial[Private], listener: _Listener) -> partial[object]:
    func: Private = call.func
    sort = identity(func), *map(_sort_of, call.args), *call.keywords, *map(_sort_of, call.keywords.values())
    if (binding := _found.get(sort, func)) is None:
        return partial(func._op, *call.args, **call.keywords)
    outs, candidates = _candidates(func)
    written = [call.keywords[name] for name in outs]
    kwargs = {name: value for name, value in call.keywords.items() if name not in outs}
    if written:
        kwargs["out"] = written[0] if len(written) == 1 else tuple(written)
    if binding is not func:
        return partial(binding, *call.args, **kwargs)
    for binding in candidates:
        spelling = partial(binding, *call.args, **kwargs)
        if listener.hears(spelling, call, written or call.args[:1]):
            _found[sort] = binding
            return spelling
    _found[sort] = None
    return partial(func._op, *call.args, **call.keywords)


def _sort_of(value: object) -> object:
    """What a binding may go by. (A tensor without dimensions may stand for a number.)"""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.dim() == 0, value.requires_grad
    if isinstance(value, (list, tuple)):
        return type(value), *map(_sort_of, value)
    return value if value is None or type(value) in (bool, str) else type(value)


@cache
def _candidates(func: OpOverload) -> tuple[list[str], list[Callable[..., object]]]:
    """The operator's own names for what its bindings call `out`, and those bindings, as far as it can be asked."""
    written = [a for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    outs = [a.name for a in written if a.kwarg_only]
    askable = func.namespace == "aten" and written and all(r.alias_info for r in func._schema.returns)
    return outs, bindings(func._schema.name.removeprefix("aten::"), out=bool(outs)) if askable else []


class _Other(RuntimeError):
    """Another call than the one listened for."""


class _Listener(TorchDispatchMode):
    """Hears which operator a spelling calls, and answers as if it had run."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no compiled code runs under it, and a shield against it costs 3 us a call

    def hears(self, spelling: Callable[[], object], call: Private, written: Sequence[object]) -> bool:
        """Whether the spelling makes this very call, once, and no other. It is answered with what the call has `written`."""
        returned = written[: len(call.func._schema.returns)]
        self._answer = returned[0] if len(returned) == 1 else tuple(returned) or None
        self._expected = [call]
        try:
            spelling()
        except (TypeError, RuntimeError):  # it takes other arguments, or refuses such ones
            return False
        return not self._expected

    def __torch_dispatch__(self, func: object, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        call = self._expected.pop() if self._expected else None
        if call is None or func is not call.func or not same(args, call.args) or not same(kwargs or {}, call.keywords):
            raise _Other
        return self._answer
