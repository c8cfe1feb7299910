"""Random numbers in a capture on a GPU.

A graph has to know before of each generator from which it draws; at a launch, torch tells it how far that has come. What a call
draws in a part that it recomputes, it has drawn before: so the states that it reads and sets are followed. Compiled code has
generators of its own, pairs of one for the forward and one for the backward that draws the same again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from ..._torch.cuda import counts_by_capture
from ..._torch.dynamic import Args, Kwargs
from ..._torch.operators import HigherOrderOperator
from ...aten.operators import Meaning, tensors_in
from ...capture.breaks import Break
from ...capture.dispatch import OperatorWatch
from ...errors import Again, Refusal
from ...guards.reachable import Reach
from ...state.compiled_generators import OwnGenerators, among, own_of_caller
from ...state.rng import Known, Rewind
from ...values.device_names import is_of
from ...values.wording import source_of

__all__ = ["DrawsWatch"]


class DrawsWatch(OperatorWatch):
    """Watches what one call draws."""

    def __init__(
        self, device: torch.device, reach: Reach, slots: list[torch.Tensor], borrowed: Sequence[bool],
        generators: list[torch.Generator], lent: list[torch.Generator], rewind: Rewind | None,
    ) -> None:  # fmt: skip
        """Graphs of the device are told of the `generators`; those of compiled code's own among them are `lent`. With `rewind`,
        the call is the backward of one that has read these states."""
        super().__init__(device, reach, slots, borrowed)
        self._rewind = rewind
        self._rewound = False  # numbers are drawn that the forward has drawn
        self._draws: set[bool] = set()  # the values that this had when something was drawn
        self.sets_states = False
        self._registered = generators
        self._lent = lent
        self._unknown: list[torch.Generator] = []  # those that this capture was not told of
        self.own: dict[OwnGenerators, bool | None] = {}
        """Those from which it draws. Whether what their backward draws, the forward has drawn of which this is the backward;
        None if that draws nothing."""
        self._own_calls: dict[tuple[OwnGenerators, int], int] = {}  # of compiled forwards: in which graph
        self._lending = False  # an operator that runs draws from such
        self.known_states: Known | None = None
        """Of the generators, as the capture has begun with them."""

    def draws(self, m: Meaning, args: Args, kwargs: Kwargs) -> None:
        """An operator is about to draw.

        Raises:
            Refusal: it draws on the host, or what a replay would not draw so.
        """
        if _on_host(args, kwargs):
            raise self.located(Refusal(f"{source_of(m.name)} draws random numbers on the CPU", "pass device= or draw outside"))
        if self.bodies:
            self._draws_in_body(m, kwargs.get("generator"))
        if self._rewind is not None and not self._lending:
            self._draws.add(self._rewound)
            if len(self._draws) > 1:
                raise self.located(Refusal("draws random numbers of its own in its backward, besides those that it recomputes",
                                           "draw them in the forward"))  # fmt: skip

    def _draws_in_body(self, m: Meaning, generator: object) -> None:
        """Refuse draws in a branch or loop, but from the default generator as it stands."""
        default = torch.cuda.default_generators[self.device.index]
        said = f"{source_of(m.name)} draws random numbers in a branch or loop"
        if generator not in (None, default) or self._lending:
            raise self.located(Refusal(f"{said} from another generator than the default one", "draw them outside of that"))
        if counts_by_capture() or self._rewind is not None or self.states.held():
            why = "with this release of torch" if counts_by_capture() else "where states of the generator are kept"
            raise self.located(Refusal(f"{said} {why}", "draw them outside of that"))
        self._has_its_own("draws from", self.device)

    def uneven(self) -> bool:
        """Whether how much was drawn so far depends on what tensors hold."""
        return False

    def may_cut(self, part: Break) -> None:
        """Refuse the end of a graph before a part that runs live, in the middle of what is drawn."""
        if self.sets_states or self.states.held():
            raise Refusal(f"runs {part.said} live, and keeps a state of a random generator", "call it outside")
        if self.own and self.has_backward and self._rewind is None:
            raise self.located(_both_sides())

    # -- states

    def _has_its_own(self, does: str, of: torch.device) -> None:
        """Where a generator has another's state, a place in the count is one in the count of that."""
        default = torch.cuda.default_generators[self.device.index]
        if of == self.device and self.known_states is not None and not self.known_states.is_own(default):
            raise Refusal(f"{does} the state of a random generator where that is another's (graphsafe_set_state)",
                          "do it before, or exchange whole states: graphsafe_get_state")  # fmt: skip

    def _count_known(self, does: str, of: torch.device) -> None:
        """Refuse a place in the count where that is not what was counted."""
        if self.bodies or (of == self.device and self.uneven()):
            where = "in a branch or loop" if self.bodies else "after a branch or loop that draws random numbers"
            raise Refusal(f"{does} the state of a random generator {where}", "do it before")

    def state_read(self, state: torch.Tensor, of: torch.device) -> None:
        self._count_known("reads", of)
        self._has_its_own("reads", of)
        self.states.read(state, self._rewound)
        self.forks(state)

    def state_set(self, state: torch.Tensor, of: torch.device) -> None:
        if of.type == "cuda" and of.index != self.device.index:
            raise Refusal(f"sets the state of the generator of {of}", "do that outside the recorded function")
        self._count_known("sets", of)
        self._has_its_own("sets", of)
        rewound = (self._rewind is not None and self._rewind.knows(state)) or self.states.meaning(state)
        if of.type == "cuda":
            self.sets_states = True
            self._rewound = rewound

    # -- generators

    def meet(self, generator: torch.Generator) -> None:
        super().meet(generator)
        if is_of(generator, self.device) and not among(generator, self._registered):
            self._registered.append(generator)
            raise Refusal("uses a random generator that was not known before the capture", "keep it as an attribute, closure "
                          "variable or global, or pass it as an argument", final=False)  # fmt: skip

    def _of_higher_order(self, func: HigherOrderOperator, args: Args, kwargs: Kwargs) -> object:
        outer, self._lending = self._lending, any(isinstance(x, torch.Generator) for x in kwargs.values())
        try:
            return super()._of_higher_order(func, args, kwargs)
        finally:
            self._lending = outer

    def lent(self, generator: torch.Generator) -> torch.Generator:
        """Compiled code has a pair for each place where its backward draws again what its forward has drawn: they are noted all
        together, and here and now it is drawn from the default one."""
        if not is_of(generator, self.device):
            return super().lent(generator)
        if among(generator, self.generators):  # the user's
            return generator
        called = own_of_caller(sys._getframe(1))
        if called is None or not among(generator, [*called[0].forward, *called[0].backward]):
            raise self.located(Refusal("draws random numbers from generators of compiled code's own, and nobody says whose",
                                       "record it uncompiled"))  # fmt: skip
        if among(generator, called[0].forward):
            self._draws_own(*called)
        else:
            self._draws_again(*called)
        new = [g for g in (*called[0].forward, *called[0].backward) if not among(g, self._registered)]
        self._lent.extend(g for g in (*called[0].forward, *called[0].backward) if not among(g, self._lent))
        if new:
            self._registered.extend(new)
            self._unknown.extend(new)
            self.refusal = self.refusal or Again("uses random generators that were not known before the capture",
                                                 "call it once more", final=False)  # fmt: skip
        if among(generator, self._unknown):
            return torch.cuda.default_generators[self.device.index].graphsafe_get_state()
        return generator

    def _draws_own(self, own: OwnGenerators, number: int) -> None:
        """The forward of a compiled function draws."""
        if self.has_backward and self._rewind is None and self.parts:
            raise self.located(_both_sides())
        if (own, number) not in self._own_calls:
            own.settle(begun=number)
            self._own_calls[own, number] = len(self.parts)
            self.own.setdefault(own, None)

    def _draws_again(self, own: OwnGenerators, number: int) -> None:
        """The backward of a compiled function draws what its forward has drawn: in this graph, or in that of which this is the
        backward."""
        here = self._own_calls.get((own, number))
        if here is None and not (self._rewind is not None and self._rewind.has_called(own, number)):
            raise self.located(Refusal("draws again random numbers of compiled code that was called outside of it",
                                       "record what contains that call as well"))  # fmt: skip
        if here is not None and here != len(self.parts):
            raise self.located(_both_sides())
        rewinds = here is None
        if self.own.get(own, rewinds) not in (None, rewinds):
            raise self.located(Refusal("draws again, in one backward, random numbers of compiled code that was called in it "
                                       "and of such that was called before", "record the whole step"))  # fmt: skip
        self.own[own] = rewinds


def _both_sides() -> Refusal:
    said = "draws random numbers from generators of compiled code's own, before what runs live, and again after that"
    return Refusal(said, "record the parts by themselves")


def _on_host(args: Args, kwargs: Kwargs) -> bool:
    """Whether an operator draws there: where it says so, and otherwise where its tensors are."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"]).type == "cpu"
    tensors = tensors_in(list(kwargs.values()), tensors_in(args, []))
    if tensors:
        return all(t.device.type == "cpu" for t in tensors)
    return torch.get_default_device().type == "cpu"
