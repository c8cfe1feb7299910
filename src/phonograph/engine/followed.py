"""The numbers that one capture follows from call to call: where they are, and whether each use of them was found.

A number is followed by putting a probe in its place. If the program has not got each probe, or code did with one what a replay
could not do again, the capture is made once more with the number baked in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import Refusal
from ..guards.followed_numbers import Fixed, Unfollowed, asks_of_classes, is_compiled, judged, marked, of_arguments
from ..guards.tensor_numbers import in_tensors
from ..python.holders import Spot
from ..python.names_in_code import CYCLED, LIVE
from ..values.counters import Followed
from ..values.pytree import flatten
from .capture_terms import Request, Terms, Untraced
from .evidence import Evidence

__all__ = ["check_hyperparameters", "check_numbers", "give_up", "spots_of"]


def spots_of(request: Request) -> tuple[list[Spot], list[object]]:
    """The places of the numbers that are to be followed, and the values of those that are arguments.

    Raises:
        Fixed: numbers among the arguments cannot be followed in this call.
    """
    terms, reach = request.terms, request.reach
    spots: list[Spot] = []
    # A backward that is recorded by itself, or runs, goes by numbers that its forward has noted.
    if terms.following is not None and request.whole:
        wanted = terms.following.wanted() - terms.concessions.baked
        spots = [*marked(reach, wanted), *(in_tensors(reach, wanted) if not any(map(is_compiled, reach.met)) else ())]
    in_arguments, values = of_arguments(request.call, request.function)
    if in_arguments and (terms.following is None or not request.whole or any(map(is_compiled, reach.met))):
        raise Fixed(range(len(in_arguments)))
    return [*in_arguments, *spots], values


def check_numbers(request: Request, evidence: Evidence) -> None:
    """Whether each number was found wherever it was used.

    Raises:
        Unfollowed: some were not.
        Refusal: code may have asked for the class of one that is read when a replay has run.
    """
    dials, captured, reach = evidence.dials, evidence.captured, request.reach
    if captured.watch.numerals and asks_of_classes(dials, evidence.behaviour.code.functions):
        raise captured.watch.would_refuse[0]
    if not dials.spots:
        return
    leaves: list[object] = []
    flatten(captured.result, leaves)
    for leaf in leaves:
        if isinstance(leaf, Followed):
            dials.hands_out(leaf)
    dials.left_in(evidence.behaviour.returned.all_containers())
    code, training = evidence.behaviour.code, all(m.training for m in reach.modules)
    known = code.known
    more, reads = ((), known.reads) if known is not None else (reach.met, None)
    judged(dials, code.functions, code.sets_hooks, more, training, reads)
    if any(part.may_read(dials.wide) for part in captured.watch.parts):
        dials.stray_all("is read where parts of the function run live")
    if any(part.may_write_anything() for part in captured.watch.parts):
        dials.stray_tensors("may be written where parts of the function run live")
    if not dials.fit():
        dials.stray_all("is no number that can be worked with")
    if not dials.strays:
        numbers = dials.numbers()
        for n in numbers.keys() - captured.program.set_numbers(numbers):
            dials.stray(dials.formulas[n], "was not found in what an operator launches")
        if captured.program.holds(dials.wide):
            dials.stray_all("is taken by what is no operator")
    if fixed := dials.strays.keys() & range(len(dials.given)):
        raise Fixed(fixed)
    if dials.strays:
        raise Unfollowed({dials.spots[i].at: why for i, why in dials.strays.items()})


def check_hyperparameters(request: Request, evidence: Evidence) -> None:
    """Whether the program follows the hyper-parameters and step counts of optimizers.

    Raises:
        Untraced: it does not.
        Refusal: it could not with fewer of them either.
    """
    dials, captured, notes = evidence.dials, evidence.captured, request.terms.notes
    if dials.lost or not (dials.fit() and dials.numbers().keys() <= captured.program.set_numbers(dials.numbers())):
        if not dials.sources:
            raise Refusal("steps an optimizer whose step count cannot be followed on this device", "fused=True",
                          final=False)  # fmt: skip
        raise Untraced(LIVE if any(key in CYCLED for _, key in dials.sources) and not dials.read else ())
    dials.settle()
    if captured.watch.parts and notes is not None and not notes.turned <= dials.followed:
        raise Refusal("calls a function that is marked @pg.live and sets a hyper-parameter which cannot be followed",
                      "set it outside")  # fmt: skip


def give_up(terms: Terms, spots: Mapping[Any, str]) -> None:
    """Note the numbers that could not be followed in a capture, with the reasons."""
    for at, why in spots.items():
        terms.following.fail(at, why)  # type: ignore[union-attr]
