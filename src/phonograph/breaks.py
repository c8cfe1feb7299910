"""What runs live between two segments of a recording: an operator that needs the host, or a function marked `@pg.live`.

Either reads the memory of the recording, and what it gives is copied to where the next segment reads it. An operator works in
that memory. A function of the user's may keep what it is given, and do what it likes: it gets copies, which are copied back. It
has effects that nobody else knows of, and has them once in each call; where a replay cannot go on after it and the call begins
again, it does not run a second time: what it gave and wrote is `Done` again.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import torch

from .errors import Refusal
from .forms import Form, Meta, alone, form_of, sizes_of
from .identity import identity
from .marked import Given
from .pool import copy_of, once
from .torch_private import below_autograd
from .trees import Node, flatten, unflatten
from .within import Within

__all__ = ["HERE", "Break", "Done", "MarkedBreak", "Torn"]

HERE = object()  # stands for a tensor that lies in the recording's memory


class Break:
    """A live operator, between two segments."""

    grads: Sequence[tuple[torch.Tensor, torch.Tensor | None]] = ()

    def __init__(self, form: Form, shape: Node | None, leaves: list[Any], where: str) -> None:
        self.form = form
        self.where = where
        self._grad_mode = torch.is_grad_enabled()
        self._shape, self._leaves = shape, leaves  # its arguments
        self._places = [i for i, x in enumerate(leaves) if x is HERE]
        self._inputs: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []

    def __str__(self) -> str:
        return f"{self.form.operator.name()} at {self.where}"

    def lies(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Where the device has put what it reads and what it gives: tensors that do not own their memory."""
        self._inputs, self._outputs = inputs, outputs

    def settle(self) -> None:
        """The capture has ended.

        Raises:
            Refusal: this cannot be done between segments.
        """

    def run(self, done: list[Done], generators: Sequence[Any]) -> bool:
        """Call it, and put what it gives where the next segment reads it. Returns whether it gives that still. What must not be
        done a second time in this call is `done`.

        Raises:
            Torn: it has done what neither the replay nor a live call from the beginning can go on after.
        """
        args, kwargs = self._arguments(self._inputs)
        sizes = sizes_of(args, kwargs)
        with Within(waits=True), below_autograd(), torch.set_grad_enabled(self._grad_mode):
            result = self.form.operator(*args, **kwargs)
            if form_of(self.form.operator, args, kwargs, result) != self.form or sizes_of(args, kwargs) != sizes:
                return False
            self._put(result)
        return True

    def _arguments(self, inputs: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        leaves = [*self._leaves]
        for i, t in zip(self._places, inputs, strict=True):
            leaves[i] = t
        args, kwargs = unflatten(self._shape, iter(leaves))
        return args, kwargs

    def _put(self, result: Any) -> None:
        found: list[Any] = []
        flatten(result, found)
        new = [x for x, kind in zip(found, self.form.results, strict=True) if isinstance(kind, Meta)]
        for place, t in zip(self._outputs, new, strict=True):
            once(place).copy_(once(t))


class Torn(Exception):
    """What a marked function has done, and cannot be made good."""


class MarkedBreak(Break):
    """A function that is marked `@pg.live`, between two segments.

    `outside` says of each input whether its memory is somebody else's too: what is written there has to be known beforehand.
    `grads` are the gradients that the call has given to parameters before it: a replay leaves them there only at its end.
    `keeps` says which arguments somebody has kept in a live call, and `rewritten` which inputs are written after it.
    """

    def __init__(self, form: Form, shape: Node | None, leaves: list[Any], where: str, outside: Sequence[bool],
                 grads: Sequence[tuple[torch.Tensor, torch.Tensor | None]], keeps: Set[int],
                 rewritten: Sequence[list[bool]]) -> None:  # fmt: skip
        super().__init__(form, shape, leaves, where)
        self._outside = outside
        self.grads = grads
        self._keeps = keeps
        self._rewritten = rewritten

    def settle(self) -> None:
        runs = f"runs {self.form.operator.name()} live"
        if any(p.grad is not grad for p, grad in self.grads):
            raise Refusal(f"{runs} while gradients are there that it drops later", "call it outside of that", self.where)
        if any(i in self._keeps and rewritten for i, (rewritten,) in zip(self._places, self._rewritten, strict=True)):
            raise Refusal(f"{runs}, which keeps a tensor that is written later", "let it keep a clone", self.where)

    def run(self, done: list[Done], generators: Sequence[Any]) -> bool:
        with torch.no_grad():
            copies = [*map(copy_of, self._inputs)]
        args, kwargs = self._arguments(copies)
        leaves: list[Any] = []
        flatten((args, kwargs), leaves)
        tensors = {i: x for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
        given, earlier = Given([*tensors.values()]), Given([t for one in done for _, t in one.arguments])
        with Within(waits=True), torch.set_grad_enabled(self._grad_mode):
            box = [self.form.operator(*args, **kwargs)]
        form = alone(form_of(self.form.operator, args, kwargs, box[0]), box, {*map(identity, given.tensors)})
        form = form._replace(writes=tuple(i for i, w in zip(tensors, given.written(), strict=True) if w))
        kept = {i for i, k in zip(tensors, given.kept(box), strict=True) if k}
        if any(i in kept and rewritten for i, (rewritten,) in zip(self._places, self._rewritten, strict=True)):
            raise Torn("has kept a tensor that is written later (let it keep a clone)")
        if any(earlier.written()):
            raise Torn("has written what one was given before it")
        after = tuple(zip(self._places, copies, strict=True))
        done.append(Done(self.form.operator, box[0], after, tuple((g, g.get_state()) for g in generators)))
        if form != self.form or given.resized():
            return False
        with torch.no_grad():
            for (i, t), place, outside in zip(after, self._inputs, self._outside, strict=True):
                if outside and i not in form.writes and _differ(place, t):
                    return False  # written in a way that leaves no trace (`x.data`)
            for (i, t), place, outside in zip(after, self._inputs, self._outside, strict=True):
                if not outside or i in form.writes:
                    once(place).copy_(once(t))
            self._put(box[0])
        return True


class Done(NamedTuple):
    """What a marked function has done in a call: its result, the values of its arguments after it (by their places), and where
    the generators stood then."""

    marked: Any
    result: Any
    arguments: tuple[tuple[int, torch.Tensor], ...]
    states: tuple[tuple[Any, torch.Tensor], ...]

    def again(self, args: Any, kwargs: Any) -> Any:
        """The same, in a call with these arguments. Returns the result."""
        given: list[Any] = []
        flatten((args, kwargs), given)
        theirs = {}
        with torch.no_grad():
            for i, t in self.arguments:
                theirs[identity(t)] = given[i]
                if _differ(given[i], t):
                    once(given[i]).copy_(once(t))
        for generator, state in self.states:
            generator.set_state(state)
        leaves: list[Any] = []
        shape = flatten(self.result, leaves)
        return unflatten(shape, iter([theirs.get(identity(x), x) for x in leaves]))


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of the same metadata hold other bits."""
    a, b = a.detach().contiguous().view(-1), b.detach().contiguous().view(-1)
    return not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
