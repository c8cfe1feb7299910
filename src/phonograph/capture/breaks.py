"""What runs live between two segments of a recording: an operator that needs the host, a function marked `@pg.live`, or a look
at a number by which the call goes on.

Either reads the memory of the recording, and what it gives is copied to where the next segment reads it. An operator works in
that memory. A function of the user's may keep what it is given, and do what it likes: it gets copies, which are copied back. It
has effects that nobody else knows of, and has them once in each call; where a replay cannot go on after it and the call begins
again, it does not run a second time: what it gave and wrote is `Done` again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence, Set
from itertools import islice
from typing import NamedTuple

import torch

from .._torch.dynamic import Args, Context, Kwargs, Leaves, Thing
from .._torch.modes import below_autograd
from .._torch.operators import OpOverload
from .._torch.tensors import alias
from ..aten import operators
from ..aten.autocast import Casts
from ..errors import Refusal
from ..memory.pool import copy_of, unexpanded
from ..python.identity import identity
from ..state.reentrancy import Nested
from ..state.rng import put
from ..values.formulas import Values
from ..values.host_scalars import READS_NUMBER
from ..values.pytree import flatten, unflatten
from ..values.pytree_nodes import Node
from .arrivals import Arrived
from .live_arguments import HISTORY, Given, differ
from .live_results import SHARES, Form, Meta, form_of, sizes_of

__all__ = ["HERE", "Break", "Decision", "Done", "MarkedBreak", "Torn"]

_SHAPE = "gives a result of another shape than before"
HERE = object()  # stands for a tensor that lies in the recording's memory


class Break:
    """A live operator, between two segments."""

    grads: Sequence[tuple[torch.Tensor, torch.Tensor | None]] = ()
    changed_grads: Sequence[tuple[torch.Tensor, torch.Tensor | None]] = ()
    """Gradients that the call has given to parameters before the operator. They are seen where it raises."""
    remedy = "use what gives a fixed shape, or call it outside"
    around: Callable[[], Thing] | None = None
    """Gives the module in which it is, if that could run live as a whole."""
    caught = False
    """Whether the call begins again where it raises: code may catch that, or see what the call has done before it."""

    def __init__(
        self, form: Form, shape: Node | None, leaves: list[object], where: str, casts: tuple[object, ...] = ()
    ) -> None:
        self.form = form
        self.where = where
        self.said = form.operator.name()  # in reasons
        self._grad_mode, self._casts = torch.is_grad_enabled(), casts
        self._shape, self._leaves = shape, leaves  # its arguments
        self._places = [i for i, x in enumerate(leaves) if x is HERE]
        self._numbers: Sequence[int] = ()  # places where the number in a tensor is given
        self._read: list[torch.Tensor] = []  # those
        self._inputs: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self.brought: list[tuple[str, int]] = []  # by collectives of the call before it: by which, and how many tensors
        self.arrived: list[Arrived] = []  # those

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ", where autograd calls it"  # on a thread of its own
        return f"{self.form.operator.name()}{place}"

    def lies(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Where the device has put what it reads, and what has arrived before, and what it gives: tensors that do not own their
        memory."""
        own = len(inputs) - sum(count for _, count in self.brought)
        self._inputs, self._outputs = inputs[:own], outputs
        rest = iter(inputs[own:])
        self.arrived = [(name, [*islice(rest, count)]) for name, count in self.brought]

    def settle(self, undone: Sequence[torch.UntypedStorage]) -> None:
        """The capture has ended. This memory outside is put back where a call begins again.

        Raises:
            Refusal: this cannot be done between segments.
        """

    def run(self, done: list[Done], generators: Sequence[object]) -> str:
        """Call it, and put what it gives where the next segment reads it. Returns what is another than before, if that is so
        and the replay cannot go on. What must not be done a second time in this call is `done`.

        Raises:
            Torn: it has done what neither the replay nor a live call from the beginning can go on after.
        """
        args, kwargs = self._arguments(self._inputs)
        sizes = sizes_of(args, kwargs)
        with Nested(waits=True), below_autograd(), torch.set_grad_enabled(self._grad_mode), Casts.restored(self._casts):
            try:
                result = self.form.operator(*args, **kwargs)
            except (RuntimeError, ValueError, IndexError, TypeError):
                if self.caught:
                    return "raises, other than before"
                raise
            if form_of(self.form.operator, args, kwargs, result) != self.form or sizes_of(args, kwargs) != sizes:
                return _SHAPE
            self._put(result)
        return ""

    def may_write_anything(self) -> bool:
        """Whether it may write what it is not given."""
        assert isinstance(self.form.operator, OpOverload)
        return operators.meaning(self.form.operator).others

    def may_read(self, numbers: Set[float]) -> bool:
        """Whether it may be given one of these, which stand for others."""
        return not numbers.isdisjoint([x for x in self._leaves if type(x) is float])

    def _arguments(self, inputs: Sequence[torch.Tensor]) -> tuple[Args, Kwargs]:
        leaves = [*self._leaves]
        for i, t in zip(self._places, inputs, strict=True):
            leaves[i] = t
        for i, t in zip(self._numbers, self._read, strict=True):
            leaves[i] = t.item()
        args, kwargs = unflatten(self._shape, iter(leaves))
        return args, kwargs

    def _put(self, result: object) -> None:
        found: Leaves = []
        flatten(result, found)
        new = [x for x, kind in zip(found, self.form.results, strict=True) if isinstance(kind, Meta)]
        for place, t in zip(self._outputs, new, strict=True):
            unexpanded(place).copy_(unexpanded(t))


class Decision(Break):
    """A number is read of a tensor, by which the call goes on: the next segment is what comes after this very number. Or it is
    what is worked out of such, and of the numbers that are `followed`."""

    remedy = 'torch.where instead of `if`, unless that is rare; or torch.compile(..., backend="phonograph")'

    def __init__(
        self, number: object, said: str, where: str, work_out: Callable[[Values], Sequence[object]] | None = None,
        followed: Callable[[], Values] = tuple,
    ) -> None:  # fmt: skip
        super().__init__(Form(READS_NUMBER, None, ()), None, [HERE], where)
        self.said = said
        self._number, self._work_out, self._followed = number, work_out, followed

    def __str__(self) -> str:
        return f"a look at a number{f' at {self.where}' if self.where else ''}, which has to be {self._number!r}"

    def run(self, done: list[Done], generators: Sequence[object]) -> str:
        with Nested(waits=True), below_autograd():
            read = [t.item() for t in self._inputs]
        now = read[0] if self._work_out is None else self._work_out((*self._followed(), *reversed(read)))[0]
        return "" if repr(now) == repr(self._number) else "reads another number than before"


class Torn(Exception):
    """What a marked function has done, and cannot be made good."""


class MarkedBreak(Break):
    """A function that is marked `@pg.live`, between two segments.

    `historied` says of each input whether it has a history.
    `grads` are the gradients that the call has given to parameters before it: a replay leaves them there only at its end.
    At the places `numbers` it is given the numbers in tensors.
    `keeps` says which arguments somebody has kept in a live call, and `rewritten` which inputs others may write after it.
    """

    def __init__(self, form: Form, shape: Node | None, leaves: list[object], where: str, historied: Sequence[bool],
                 grads: Sequence[tuple[torch.Tensor, torch.Tensor | None]], keeps: Set[int],
                 rewritten: Sequence[list[bool]], numbers: Sequence[int] = ()) -> None:  # fmt: skip
        super().__init__(form, shape, leaves, where)
        self._kept = form.operator.keeps()  # type: ignore[union-attr]
        self._numbers = numbers
        self._historied = historied
        self.grads = grads
        self._keeps = keeps
        self._rewritten = rewritten
        self._undone: Set[int] = frozenset()  # the arguments that are put back where the call begins again

    def may_write_anything(self) -> bool:
        return True

    def may_read(self, numbers: Set[float]) -> bool:
        return True  # its code gets at them wherever they lie

    def lies(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        super().lies(inputs, outputs)
        count = len(self._places)
        self._inputs, self._read = self._inputs[:count], self._inputs[count:]

    def settle(self, undone: Sequence[torch.UntypedStorage]) -> None:
        keys = {storage._cdata for storage in undone}
        tensors = ((i, x) for i, x in enumerate(self._leaves) if isinstance(x, torch.Tensor))
        self._undone = {i for i, t in tensors if t.untyped_storage()._cdata in keys}
        runs = f"runs {self.said} live"
        if any(grad is not None and p.grad is not grad for p, grad in self.grads):
            raise Refusal(f"{runs} while gradients are there that it drops later", "call it before them, or after", self.where)
        if any(i in self._keeps and rewritten for i, (rewritten,) in zip(self._places, self._rewritten, strict=True)):
            raise Refusal(f"{runs}, which keeps a tensor that others may write later", "let it keep a clone", self.where)

    def run(self, done: list[Done], generators: Sequence[Thing]) -> str:
        with torch.no_grad():
            copies = [alias(copy_of(t)) for t in self._inputs]  # no views, which autograd would look after
        with torch.enable_grad():
            for t, historied in zip(copies, self._historied, strict=True):
                if historied:
                    _Historied.apply(torch.empty(0, requires_grad=True), t)
        args, kwargs = self._arguments(copies)
        earlier = [t for one in done for _, t in one.arguments]
        versions = [t._version for t in earlier]
        box: Leaves = []
        with Nested(waits=True), torch.set_grad_enabled(self._grad_mode):
            given = Given(args, kwargs, dict(zip(self._places, self._inputs, strict=True)))
            try:
                box.append(self.form.operator(*args, **kwargs))
            except BaseException:
                self._put_back(copies, given.written())
                raise
            torn = given.changed(box)
        form = form_of(self.form.operator, args, kwargs, box[0])
        unlike, written = given.unlike(box), given.written()
        if HISTORY in unlike or SHARES in form.objection:
            torn = HISTORY if HISTORY in unlike else SHARES
        if versions != [t._version for t in earlier]:
            torn = "writes what one was given before it"
        kept = given.kept(box)
        if any(i in kept and rewritten for i, (rewritten,) in zip(self._places, self._rewritten, strict=True)):
            torn = "keeps a tensor that others may write later (let it keep a clone)"
        if any(i not in self.form.writes and i not in self._undone and i not in self._places for i in written):
            torn = "writes a tensor from outside, too large to be put back, that it had not written"
        if torn:
            raise Torn(torn)
        own = [(i, t) for i, t in given.tensors.items() if i not in self._places and (i in written or i in self._undone)]
        after = tuple(zip(self._places, copies, strict=True))
        values = after + tuple((i, t.detach().clone()) for i, t in own)
        states = tuple((g, g.get_state()) for g in generators)
        done.append(Done(self.form.operator, box[0], values, states, frozenset(identity(t) for _, t in own)))
        if unlike or form._replace(writes=self.form.writes) != self.form:
            return _SHAPE
        if not {*written} <= {*self.form.writes}:
            return "writes others of its arguments than before"
        self._put_back(copies, written)
        with torch.no_grad():
            self._put(box[0])
        return ""

    def _put_back(self, copies: Sequence[torch.Tensor], written: Container[int]) -> None:
        with torch.no_grad():
            for i, place, t in zip(self._places, self._inputs, copies, strict=True):
                if i in written:
                    unexpanded(place).copy_(unexpanded(t))


class _Historied(torch.autograd.Function):
    """Gives a copy the look of a tensor with a history, as what it is a copy of has."""

    @staticmethod
    def forward(ctx: Context, nothing: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(t)
        return t

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> object:
        raise RuntimeError("a function that is marked @pg.live differentiates what it is given, for the first time in a replay")


class Done(NamedTuple):
    """What a marked function has done in a call: its result, the values after it of what it was given copies of, and of what it
    has written, by their places; and where the generators stood then."""

    marked: Callable[..., object]
    result: object
    arguments: tuple[tuple[int, torch.Tensor], ...]
    states: tuple[tuple[torch.Generator, torch.Tensor], ...]
    own: frozenset[int]  # the tensors outside that it was given and has written, by identity

    def again(self, args: Args, kwargs: Kwargs) -> object:
        """The same, in a call with these arguments. Returns the result."""
        given: Leaves = []
        flatten((args, kwargs), given)
        theirs = {}
        with torch.no_grad():
            for i, t in self.arguments:
                theirs[identity(t)] = given[i]
                if differ(given[i], t):
                    unexpanded(given[i]).copy_(unexpanded(t))
        for generator, state in self.states:
            put(generator, state)
        leaves: list[object] = []
        shape = flatten(self.result, leaves)
        return unflatten(shape, iter([theirs.get(identity(x), x) for x in leaves]))
