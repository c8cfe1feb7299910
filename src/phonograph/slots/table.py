"""A recording is a table of columns. Begin here.

A recording is a program with addresses and numbers baked in. What it exchanges with the world lies in *places outside the
call*: arguments, weights, gradients, attributes, generators. A *column* has all places of one kind, each column has the same
verbs, and a replay (`engine/player.py`) is these verbs, one after the other:

    fits      may the program run, as the world is now?    what does not fit is named, and the call goes another way
    fill      what lies outside goes into the program
    run       by the device
    leave     what the program has made goes to its places
    results   tensors for the caller are made (`engine/results.py`); some are effects, and go to places as well

    column      its places                           fits                      fill               leave
    memories    its own results; tensors it writes   are where they were       -                  have a new version
    draws       random generators                    one state each, or not    (in the run)       (in the run)
    numbers     rates, coefficients, counts          decide the same           into the program   are those of the next call
    constants   all else that the call has read      are unchanged             -                  -
    gradients   `.grad` of parameters                are there, or not         those that are fed those that it has made
    inputs      arguments, carried state             (by the signature)        those elsewhere    those that it has written
    effects     attributes, containers               -                         -                  counts, values, results

What always holds:

1. *Nothing is filled before all fits.* To ask changes nothing that a live call could see, so a call that does not fit can run
   live, or be recorded, as if nobody had asked.
2. *Who holds memory that a replay overwrites* is another question, and the pool's (`memory/pool.py`); but for gradients, of
   which only their column knows how many references are its own (`Grads.held`).
3. *Arguments are copied to their slots before the launch, and what was written there is copied back after it*, on one stream.
   So nobody waits for the device.
4. *What is left may be left again.* If an exception comes in the midst of it (Ctrl-C), the effects of a run are half published:
   then all steps are run once more (`publish`). A step that adds remembers that it has (`Effects`).
5. *What a broken run has written stays*, as in eager, and each column leaves what eager would have left by then (`break_off`).
6. *The first play ends the capture* (`leave_first`). Up to it those gradients stand outside that the capture has left, and an
   exception puts back what was there. With it they are sealed, before anybody is handed one: from then on the parameters and
   the recording hold them, and whoever else does is told apart by the number of references.
7. *Counts come last*, when all is left that is the same if it is left twice.
8. *What a column has not to do costs nothing.* Its verbs are lists of functions, empty ones mostly; the table writes each verb
   out as one expression when the recording is made. No replay loops over places in Python: a column has them together, for one
   call of C. A known call (`engine/known_calls.py`) is its tensors alone, and has None in the place of a `Call`.

A new kind of place is a new column, or joins one of these. How a place is found, and whether code that ran may depend on it, is
asked once, in the capture (`guards/`, `capture/`); here is what each replay has to do about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ..call.signature import Call
from ..python.origin import written_out
from ..python.putting_back import put_back
from .column import Broken, Check, Step, Tensors
from .constants import Constants
from .draws import Draws
from .effects import Effects
from .gradients import Grads
from .inputs import Inputs
from .memories import Memories
from .numbers import Numbers

__all__ = ["Table"]


class Table:
    """The columns of one recording."""

    def __init__(
        self, memories: Memories, draws: Draws, numbers: Numbers, constants: Constants, gradients: Grads, inputs: Inputs,
        effects: Effects,
    ) -> None:  # fmt: skip
        self.memories, self.draws, self.numbers, self.constants = memories, draws, numbers, constants
        self.gradients, self.inputs, self.effects = gradients, inputs, effects
        self._tensors = [*memories.leave(), *gradients.leave()]
        self._counts = [*effects.leave(), *numbers.leave()]
        fit = [*memories.fits(), *draws.fits(), *numbers.fits(), *constants.fits()]
        fill = [*numbers.fill(), *gradients.fill(), *effects.fill()]
        leave = [*self._tensors, *self._counts]
        names: dict[str, object] = {"lost": memories.lost, "inputs": inputs, "gradients": gradients}
        unfit = " or ".join(["(lost[0] if lost else None)", *_called("fit", fit, names)])
        all_unfit = " or ".join([unfit, *_called("fit_gradients", gradients.fits(), names)])
        ready = [f"not ({unfit})", *_called("ready", gradients.ready(), names)]
        ready += ["inputs.are_there(tensors)"] if inputs.borrowed else []
        self.fits: Check = written_out(f"lambda: {all_unfit}", names)
        """The name of what forbids a replay; None if nothing does."""
        self.ready: Callable[[Tensors], bool] = written_out(f"lambda tensors: {' and '.join(ready)}", names)
        """Whether nothing does, for a known call with these arguments, and nobody holds a gradient that it would overwrite."""
        filled = [*_called("fill", fill, names), *["inputs.fill(tensors, call)"][: len(inputs.borrowed)]]
        self.fill = _exchange(filled, names)
        self.leave = _exchange([*["inputs.leave(tensors, call)"][: inputs.writes], *_called("leave", leave, names)], names)

    def leave_first(self, tensors: Tensors, call: Call | None) -> None:
        """In place of `leave`, after the first play."""
        self.inputs.leave(tensors, call)
        _all_of(self._tensors)
        self.gradients.seal()
        _all_of(self._counts)

    def publish(self, tensors: Tensors, call: Call | None) -> None:
        """An exception has come when the effects of a run were half published: they are now."""
        put_back(partial(self.inputs.leave, tensors, call), *self._tensors, self.gradients.seal, *self._counts)

    def break_off(self, tensors: Tensors, call: Call | None, run: Broken) -> None:
        """In place of `leave`, after a run that was broken off."""
        try:
            self.inputs.leave(tensors, call)
            self.memories.break_off(run)
            self.gradients.break_off(run)
            self.gradients.seal()
        finally:
            self.numbers.break_off(run)
            self.effects.break_off(run)

    def explain(self) -> Iterator[str]:
        """Lines about all places."""
        for one in (self.inputs, self.effects, self.constants):
            yield from one.explain()

    def close(self) -> None:
        """Nobody plays this recording any more."""
        self.constants.close()
        self.gradients.close()


def _all_of(steps: Sequence[Step]) -> None:
    for step in steps:
        step()


def _called(name: str, functions: Sequence[Callable[[], object]], names: dict[str, object]) -> list[str]:
    """The calls of these in an expression, in which they have such `names`."""
    named = {f"{name}{i}": function for i, function in enumerate(functions)}
    names |= named
    return [f"{one}()" for one in named]


def _exchange(calls: Sequence[str], names: dict[str, object]) -> Callable[[Tensors, Call | None], object] | None:
    """One function that makes all of these; None if there are none."""
    return written_out(f"lambda tensors, call: ({', '.join(calls)},)", names) if calls else None
