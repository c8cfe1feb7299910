"""Refusals in a call that is captured: each gets the user's line, and the remedy for the library that it comes from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import torch

from .._torch.dynamic import Thing
from ..errors import Refusal
from ..guards.reachable import Reach
from ..python.identity import identity
from ..python.introspection import own_dict
from ..python.origin import in_package, runs_through, users_line
from ..values.wording import COMPILED

__all__ = ["Refusals"]

# Libraries that look at values where their user need not let them.
_VALIDATES = ("pass validate_args=False to the distribution, which looks at its arguments' values, or turn that off for all "
              "(torch.distributions.Distribution.set_default_validate_args(False))")  # fmt: skip
_REMEDIES = {
    "torch/distributions/distribution.py:__init__": _VALIDATES,
    "torch/distributions/distribution.py:_validate_sample": _VALIDATES,
    "torch/nn/utils/clip_grad.py": "leave error_if_nonfinite as it is by default, False",
    "torch/amp/grad_scaler.py:_maybe_opt_step": "make the optimizer with fused=True, or with capturable=True on a GPU: now it "
    'keeps its step count on the host, and the device decides whether it steps; or fallback="split"',
    "torch/nn/modules/rnn.py": "lengths of packed sequences are read on the host: pass padded tensors, and mask them",
    "torch/nn/utils/rnn.py": "lengths of packed sequences are read on the host: pass padded tensors, and mask them",
    "torch/optim/lbfgs.py": "LBFGS decides on the host how often it calls its closure: record the model that the closure calls",
    "torch/nn/modules/transformer.py:_detect_is_causal_mask": "pass is_causal as well as the mask: torch looks at its "
    "values otherwise",
    "torch/utils/data/dataloader.py": "take the batch outside, and pass its tensors as arguments",
    "transformers/masking_utils.py": 'transformers looks whether the attention needs a mask: fallback="split", or pass a '
    "four-dimensional attention_mask, or use an attention that gets none (docs/details.md)",
    "torch_geometric/utils/loop.py": "give the layers edges that have their loops, and add_self_loops=False; or cached=True "
    "where the graph stays the same",
}


_PACKAGE = "it is code of a package: "
_SAME = 'fallback="split", if the value is most often the same'
_FORWARD = frozenset({"forward", "__call__", "_call_impl"})


class Refusals:
    """Those of one call, in order."""

    def __init__(self, reach: Reach) -> None:
        self.refusal: Refusal | None = None
        """The first one of an operator."""
        self.noticed: list[Refusal] = []
        """All of them, with those that others have noticed."""
        self._models = reach.models

    def refuse_read(self, refusal: Refusal) -> None:
        """Refuse what reads a tensor's memory without an operator."""
        raise self.located(refusal)

    def placed(self, refusal: Refusal, frame: FrameType) -> Refusal:
        """The refusal with the user's line, of what runs in this frame; nobody has been refused yet."""
        refusal.where = users_line(frame)
        known = next((r for at, r in _REMEDIES.items() if runs_through(frame, at)), "")
        refusal.remedy = known or (refusal.of_values and self.advice(frame)) or refusal.remedy
        return refusal

    def located(self, refusal: Refusal) -> Refusal:
        """The refusal with the user's line."""
        if not refusal.where:
            self.placed(refusal, sys._getframe(2))
        # User code may catch every exception; the first refusal counts even if it never arrives at the recorder.
        self.refusal = self.refusal or refusal
        self.noticed.append(refusal)
        return refusal

    def advice(self, frame: FrameType | None = None) -> str:
        """What a user may do about values that a package looks at, whose code is not theirs to change; "" where none runs."""
        frame = frame or sys._getframe(1)
        if not in_package(frame):
            return ""
        at_work = [*_modules_at_work(frame)]
        running = {identity(part) for module, runs in at_work if runs for part in _parts(module)}
        left = running | {identity(module) for module, _ in at_work}
        whole = {name: _parts(module) for name, module in self._models().items()}
        whole = {name: parts for name, parts in whole.items() if left.isdisjoint(map(identity, parts))}
        inner = {identity(part) for parts in whole.values() for part in parts[1:]}
        sizes = {name: sum(map(_size, parts)) for name, parts in whole.items() if identity(parts[0]) not in inner}
        if any(sizes.values()):
            name = max(sizes, key=lambda name: sizes[name])
            return f"{_PACKAGE}record the model alone, {name} = pg.record({name}); or {_SAME}"
        if running:
            return f"{_PACKAGE}{COMPILED}, which goes on around it; or {_SAME}"
        return f"{_PACKAGE}call that outside of the recorded function; or {_SAME}"


def _modules_at_work(frame: FrameType | None) -> Iterator[tuple[torch.nn.Module, bool]]:
    """Modules of which a method runs, and whether that is their forward."""
    while frame is not None:
        module: Thing = frame.f_locals.get("self")
        if issubclass(type(module), torch.nn.Module):  # `isinstance` asks the object
            yield module, frame.f_code.co_name in _FORWARD
        frame = frame.f_back


def _parts(module: torch.nn.Module) -> list[torch.nn.Module]:
    """A module and those in it, by no code of its own, which would count as the call's."""
    found, left = dict[int, torch.nn.Module](), [module]
    while left:
        part = left.pop()
        if identity(part) not in found:
            found[identity(part)] = part
            left += [inner for inner in (own_dict(part) or {}).get("_modules", {}).values() if inner is not None]
    return [*found.values()]


def _size(module: torch.nn.Module) -> int:
    """How many parameters are its own."""
    return len((own_dict(module) or {}).get("_parameters", {}))
