"""Calls of one function, described: the signature, what a call can reach besides its arguments, and the device it works on.

What is learned of one call serves the next: objects that are given again and again, numbers that change, state that is carried
from call to call, names and classes that a capture has heard of.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FunctionType

import torch
from torch.autograd import forward_ad

from .._torch import autograd as torch_autograd
from .._torch import modes as torch_modes
from .._torch.dynamic import Args, Kwargs, Thing
from ..call.recurring_objects import RecurringObjects
from ..call.signature import Call, describe
from ..errors import Overlooked, Refusal
from ..guards.carried_state import Carried, Carries
from ..guards.followed_numbers import Following
from ..guards.hyperparameters import GOES_ON
from ..guards.reachable import Reach
from ..python.gc_control import uncollected
from ..python.identity import identity
from ..python.memos import MEMO
from ..python.names_in_code import likeness
from ..values.keys import NoSignature
from ..values.object_layout import layout_of
from ..values.pytree import Flattener, Opens
from ..values.pytree_paths import inside as within_label
from ..values.pytree_paths import kinds, labels, path_to
from ..values.wording import Naming
from .contained import Contained

__all__ = ["Describer", "refused_here"]


class Describer:
    """Describes the calls of one function."""

    def __init__(self, name: str, function: Callable[..., object], calls: Callable[[], int], marked: bool) -> None:
        self._name, self._function, self._calls = name, function, calls
        self.marked = marked
        """Whether it may call marked functions."""
        self.carried = Carried()
        self.heard: frozenset[str] = frozenset()
        """Names by which code that ran may have read what was overlooked."""
        self._met: list[weakref.ref[Thing]] = []  # functions that ran, classes and objects to which nothing leads from here
        self._alike = set[object]()  # of what captures have heard: its names, and what is the same in all code like it
        self._naming: Naming | None = None
        self.reset()

    def reset(self) -> None:
        """Forget what was learned from calls; not what captures have heard."""
        self.carried = Carried(self.carried.learns)
        self.following = Following()
        self.recurring = RecurringObjects(self._calls)

    # -- the signature

    def describe(self, args: Args, kwargs: Kwargs) -> Call:
        """The call, taken apart.

        Raises:
            NoSignature: it cannot be.
        """
        call = describe(args, self.with_state(kwargs), self.named, self.recurring, self.following.arguments)
        return call._replace(like=(args, dict(kwargs)))

    def with_state(self, kwargs: dict[str, object]) -> dict[str, object]:
        """The arguments by name, and the carried state."""
        return {**kwargs, **self.carried.now()} if self.carried else kwargs

    def named(self) -> Naming:
        """Names the arguments in reasons."""
        self._naming = self._naming or Naming(self._function)
        return self._naming

    def learn(self, of: Carries | Opens, call: Call) -> None:
        """Describe calls by what a capture has shown as well."""
        of.__traceback__ = of.__context__ = of.__cause__ = None  # which keep what it has made
        if isinstance(of, Opens):
            self.recurring.by_attributes |= of.kinds
        elif not self.carried.learn(of.places, self.reach(call).met):
            raise RuntimeError(f"{of.places[0].path} is known to be carried")

    # -- what a call can reach

    def reach(self, call: Call) -> Reach:
        """What the function can reach in this call.

        Raises:
            Refusal: among it is a borrowed output.
        """
        slots, name = {identity(t) for t in call.tensors}, self.named()
        objects = [(name(path_to(call.shape, i)), x) for i, x in enumerate(call.leaves) if identity(x) not in slots]
        objects += [("a key of an argument", x) for label in labels(call.shape) for x in within_label(label.value)]
        parameters = [(f"argument {i}", t) for i, t in enumerate(call.tensors) if isinstance(t, torch.nn.Parameter)]
        classes = [(kind.__qualname__, kind) for kind in kinds(call.shape)]
        found = [x for ref in self._met if (x := ref()) is not None]
        met = [((x if _has_code(x) else type(x)).__qualname__, x) for x in found]
        with uncollected():
            reach = Reach([(self._name, self._function), *objects, *parameters, *classes, *met], self.heard)
        carried = set[int]()
        for value in self.carried.standing():
            flattener, leaves = Flattener(), list[object]()
            flattener.flatten(value, leaves)
            carried.update(map(identity, flattener.containers))
            for leaf in leaves:  # an argument, wherever else it is found
                reach.tensors.pop(identity(leaf), None)
        only_there = carried - reach.shared
        self.recurring.bind(c for c in filter(_among(reach.met), call.containers) if identity(c) not in only_there)
        self.recurring.bind([t for t in call.tensors if type(t) is torch.Tensor and _is_trained(t, reach)])
        if reach.borrowed:
            raise Refusal(f"can reach a borrowed output ({reach.borrowed[0]})", "pass it as an argument, or keep a clone",
                          this_call=True)  # fmt: skip
        return reach

    def extend_reach(self, of: Overlooked) -> bool:
        """Look at what a capture has heard as well, from now on. Whether nothing like it was heard before."""
        like = {*of.names, *(likeness(x.__code__) for x in of.met if type(x) is FunctionType)}
        new, self._alike = not like <= self._alike, self._alike | like
        self.heard |= of.names
        self._met += [weakref.ref(one) for one in of.met]
        of.__traceback__ = of.__context__ = None  # which would keep what the capture has made
        of.met = (*filter(_has_code, of.met),)  # others may be the capture's own
        return new

    def read_at(self, name: str, call: Call) -> str:
        """The line that reads a variable, attribute or item of this name (``file:line``); "" for anything else."""
        name = name.removesuffix(GOES_ON)
        if " " in name and "'s " not in name:
            return ""
        last = re.split(r"\W+", name.rstrip("'\"])"))[-1]
        with suppress(Refusal), Contained("looked for who reads what has changed"):
            return self.reach(call).mentions.read_at(last)
        return ""

    # -- the device

    def device_of(self, call: Call, reach: Reach, known: torch.device | None) -> torch.device:
        """The device that a call works on; `known`, or the CPU, where there is no tensor.

        Raises:
            Refusal: there are several.
        """
        devices = {t.device for t in call.tensors}
        if any(d.type == "cuda" for d in devices) and len(devices) > 1:
            found, remedy = self._one_of_each(call), "move all arguments to one device"
            if any("." in place for place in found):
                remedy += ("; what an object moves there by itself where it is first used, as a cache does, may stay: calls "
                           "that get it then are recorded")  # fmt: skip
            raise Refusal(f"takes {' and '.join(found)}", remedy)
        outside = [t.device for _, t in reach.tensors.values() if t.device.type == "cuda"]
        if outside and not any(d.type == "cuda" for d in devices):
            if devices:
                name = next(name for name, t in reach.tensors.values() if t.device.type == "cuda")
                raise Refusal(f"takes {' and '.join(self._one_of_each(call))}, and works with {name} on CUDA",
                              "move the arguments to the device before the call")  # fmt: skip
            devices = {outside[0]}
        return next(iter(devices), known or torch.device("cpu"))

    def _one_of_each(self, call: Call) -> list[str]:
        """For each device an argument that is there."""
        found = {str(t.device): place for t, place in reversed([*zip(call.tensors, call.places, strict=True)])}
        return sorted(f"`{self.named()(path_to(call.shape, place))}` on {device}" for device, place in found.items())


def refused_here() -> NoSignature | None:
    """Why no call can be described where this one is made."""
    if torch_modes.dispatch_modes() or (torch_modes.function_modes() and torch_modes.default_device() is None):
        return NoSignature("is called under a TorchFunctionMode or TorchDispatchMode, which must see every operator",
                           "leave the mode while it is called, or look on with PHONOGRAPH=off")  # fmt: skip
    if torch_modes.transformed():
        return NoSignature("is called inside a transform of torch.func (grad, vmap, jvp)",
                           "record the function that calls the transform")  # fmt: skip
    if torch_modes.is_traced():
        return NoSignature("is called while torch.jit.trace looks on, which must see every operator",
                           "trace the plain function, or with PHONOGRAPH=off")  # fmt: skip
    if torch_autograd.saved_tensors_hooks() is not None:
        return NoSignature("is called where tensors saved for backward go through hooks (saved_tensors_hooks, save_on_cpu)",
                           "leave that context while it is called")  # fmt: skip
    if forward_ad._current_level >= 0:
        return NoSignature("is called while forward-mode derivatives are computed",
                           "record the function that computes them, with torch.func.jvp")  # fmt: skip
    return None


def _has_code(x: object) -> bool:
    """Whether this is a function, wrapped in a cache or not, or a class. (An object is not asked: it may say anything of its
    `__class__`.)"""
    return issubclass(type(x), (FunctionType, MEMO, type))


def _is_trained(t: torch.Tensor, reach: Reach) -> bool:
    """Whether this is a leaf that the function can reach by another name as well, an optimizer's most often."""
    return t.requires_grad and t.is_leaf and identity(t) in reach.tensors


def _among(things: Sequence[object]) -> Callable[[object], bool]:
    """Asks whether something is one of these objects."""
    known = {identity(x) for x in things}
    return lambda thing: layout_of(type(thing)) is not None and identity(thing) in known
