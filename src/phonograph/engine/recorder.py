"""Making a recording: a transaction.

    look   what can the function reach?                         reach.py
    guard  note everything that a capture may disturb            Transaction
    dry    capture the call on the device                        devices/
    judge  did Python code have effects? is every output one that a replay can hand out?
    settle plan outputs, take part in the pool

If anything fails, the transaction puts back what it noted: Python attributes and containers, `.grad`, random states,
optimizers' settings. The caller then runs the function live, which is the only run with effects; the exception of a
failed capture never reaches the user, because if the function itself is at fault the live run raises the same.
"""

from __future__ import annotations

import inspect
import math
import random
import re
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import is_
from types import CodeType
from typing import Any

import torch

from .._torch.autograd import in_inference, on_thread_of_autograds, share_version
from .._torch.ddp import averaging
from .._torch.dynamo import ran_compiled
from .._torch.modes import transforms_undone
from .._torch.modules import parametrizations_are_cached
from .._torch.process_groups import coalesces, wait_for_all
from .._torch.tensors import has_memory, is_ordinary, is_shape, storage_id
from ..autograd.backward import Backward
from ..autograd.release import Release
from ..autograd.saved_hooks import Tracing
from ..call.live_function import Marked
from ..call.signature import Call, attributes, modes, put_back
from ..capture.ddp_reducer import Averages, Reducers, around
from ..capture.dispatch import OperatorWatch
from ..capture.effects import Starts, together
from ..capture.live_results import Notes
from ..capture.python_events import HEARS_ALL_THREADS, Listener, alone, watching_python
from ..capture.recording import Entangled, Output, Recording, Slot, memory_of
from ..devices.base import CapturePlan
from ..devices.segments import Cuts
from ..errors import Again, Attached, Decides, Elsewhere, Overlooked, Refusal, Unseen
from ..guards import fsdp_state as shards
from ..guards.attribute_effects import Left, before, left_by
from ..guards.carried_state import Carried, Carries, is_filled
from ..guards.followed_numbers import Fixed, Following, Unfollowed, guarding, is_compiled, judged, marked, of_arguments
from ..guards.guards import Grads, Reliances, Setting, Snapshot, not_heard
from ..guards.hyperparameters import Dials, probing
from ..guards.reachable import Reach
from ..memory.pool import Lease, unowned
from ..memory.spans import Spans
from ..python.bytecode import set_at
from ..python.executed_code import Ran
from ..python.identity import identity
from ..python.loggers import Question, levels
from ..python.names_in_code import CYCLED, HISTORY, LIVE
from ..python.origin import BACKWARD, is_users
from ..state.capturable import fit_to_step
from ..values.counters import Followed
from ..values.host_scalars import without
from ..values.object_layout import layout_of
from ..values.pytree import (
    Edit,
    Opening,
    Opens,
    containers,
    entries,
    flatten,
    goes_by_pytree,
    opened_in,
    tensors_apart,
    unflatten,
)
from ..values.tensor_subclasses import parts, parts_of_all, storages
from ..values.wording import MARKED, Failure, defined_at, failure, innermost, naming, returned_at
from ..values.wording import operator as written
from . import outputs
from .process_groups import follow_program
from .returned import Returned

__all__ = ["SMALL", "Terms", "fed", "record", "recording_here", "refuse", "settled"]

_TAKING_TURNS = 2  # recordings of one signature that differ only in memory; a further one hands out copies

_KEEPS = ("keeps a tensor for backward where it cannot be followed (an attribute of ctx, a variable of a hook)",
          "use ctx.save_for_backward, or record the whole step")  # fmt: skip

_OUTLIVES = "return the new value, write into a tensor that is there (copy_), or mark the part that changes it @pg.live"
_SCHEDULER = "call the scheduler's step() outside: a recorded optimizer follows the learning rate that it sets"
_ELSEWHERE = f"call it outside the recorded function, {MARKED}"

SMALL = 64 << 10  # bytes of results in all that each replay copies to new memory, rather than that they are in the way

_recording: list[tuple[int, list[Refusal]]] = []  # the thread that captures at the moment, and what `refuse` has raised there


def recording_here() -> bool:
    """Whether the calling thread is part of a capture: it captures, or it is autograd's. Another thread of the user's is not
    concerned by the capture."""
    now = _recording[-1:]
    return bool(now) and (now[0][0] == threading.get_ident() or on_thread_of_autograds())


def refuse(refusal: Refusal) -> None:
    """Raise this in code of the user's that runs as part of a capture. It counts also where that code catches it."""
    _recording[-1][1].append(refusal)
    raise refusal


@dataclass(frozen=True)
class Terms:
    """How a call is to be captured.

    `blocked` recordings of the same signature could not be played, because outputs are held in their memory. Then a
    second one takes turns with the first; a third hands out copies of its outputs and is in nobody's way again.
    What it means that a recording keeps `apart`, or takes `turns`: see `_clearance`. With `borrow`, it hands out its own
    memory, small results too. `follow` these hyper-parameters where possible, instead of baking them in. With `tracing`,
    results may be attached to the graph of autograd, and the recording has a `backward` for them. `notes` tell of the
    operators that ran live in a call of this signature. One such call `ran` live to its end. `retain` what is saved, though
    this is the last backward that reads it. So many bytes are `expected` to be needed. It may hand on `numbers` of tensors,
    which each replay reads. `sibling` is another recording of this signature. Some arguments are what is `carried`.
    `following` says which numbers are to be followed, and is told which cannot be; without those in `baked`. Modules that
    average gradients take part (`averages`).
    """

    blocked: int = 0
    apart: bool = False
    turns: bool = False
    borrow: bool = False
    follow: tuple[str, ...] = (*LIVE, *CYCLED)
    tracing: Tracing | None = None
    notes: Notes | None = None
    ran: bool = False
    retain: bool = False
    expected: int = 0
    numbers: bool = False
    sibling: Recording | None = None
    carried: Carried = field(default_factory=Carried)
    following: Following | None = None
    baked: frozenset[Any] = frozenset()
    averages: bool = False


def record(name: str, function: Callable[..., Any], call: Call, reach: Reach, device: Any, terms: Terms) -> Recording:
    """Capture this call and return its recording, not yet played.

    Raises:
        Attached: a result is attached, and there is no `tracing`.
        Refusal: it cannot be recorded; everything is as before.
        Overlooked: it has to be looked at again, with these names, and at these functions.
        Carries: it carries state in these attributes as well.
        Opens: it changes objects that have to be taken apart by their attributes.
    """
    doubted: dict[Any, str] = {}
    while True:  # what one attempt has made is gone before the next
        try:
            with _placed(lambda said: _mentioned_at(reach, said) or defined_at(function)):
                recording = _attempt(name, function, call, reach, device, terms)
            _unfollowed(terms, doubted)
            return recording
        except _Unfollowed as e:
            terms = replace(terms, follow=e.fewer)
        except Unfollowed as e:
            _unfollowed(terms, e.spots)
            terms = replace(terms, baked=terms.baked | e.spots.keys())
        except _ReadAgain:
            terms = replace(terms, retain=True)
        except Averages:
            terms = replace(terms, averages=True)
        except (Again, _Advances):
            continue
        except Refusal as e:
            followed = terms.following.doubtful() - terms.baked if terms.following is not None else frozenset()
            if not followed or isinstance(e, (Attached, Decides, Elsewhere, Fixed)):
                raise
            e.let_go()  # perhaps it is only because of what stood in the place of numbers
            doubted = dict.fromkeys(followed, e.reason)
            terms = replace(terms, baked=terms.baked | followed)


def _unfollowed(terms: Terms, spots: dict[Any, str]) -> None:
    """What lies there could not be followed in a capture, for these reasons."""
    for at, why in spots.items():
        terms.following.fail(at, why)  # type: ignore[union-attr]


def _attempt(name: str, function: Callable[..., Any], call: Call, reach: Reach, device: Any, terms: Terms) -> Recording:
    """As `record`, on these very terms.

    Raises:
        _Unfollowed, Unfollowed, _Advances, _ReadAgain: on others it may be possible.
    """
    tracing = terms.tracing
    _check(reach, call, tracing is not None)
    # A backward that is recorded by itself, or runs, goes by numbers that its forward has noted.
    whole = terms.following is not None and tracing is None and not isinstance(function, Backward)
    spots = marked(reach, terms.following.wanted() - terms.baked) if terms.following is not None and whole else []
    arguments_spots, given_numbers = of_arguments(call)
    if arguments_spots and (not whole or any(map(is_compiled, reach.met))):
        raise Fixed
    spots = [*arguments_spots, *spots]
    in_place = tracing is None and not isinstance(function, Backward)
    reducers = Reducers(reach.modules, whole=in_place, part=terms.averages or not in_place)
    if tracing is not None and not _is_graph(function):
        around(device)
    protected, copies_out, release = _clearance(device, terms, function)
    protected |= Spans((borrowed.loan.address, borrowed.loan.nbytes) for borrowed in call.lent.values())
    with ExitStack() as stack:
        buckets = stack.enter_context(reducers.taking_part(device))
        grads = Grads([t for _, t in reach.all_tensors], device.outlives, [t for _, t in reach.gathered if t.is_leaf])
        snapshot = stack.enter_context(_transaction(reach, grads))
        arguments, fixed = _arguments(call, device, in_place)
        shared = _shared(terms, device, fixed)
        protected |= Spans(memory_of(s) for s in shared if s is not None)
        # Gradients stay in their place, small ones too, where an optimizer that is recorded beside will find them again.
        small = 0 if isinstance(function, Backward) else SMALL
        most = 0 if terms.borrow else math.inf if copies_out else small
        with probing(reach, terms.follow, spots) as dials, fit_to_step(reach.optimizers):
            dials.given = given_numbers
            captured = _capture(function, call, reach, snapshot, device, grads, arguments, fixed, shared, protected, dials,
                                most, terms, release, reducers.begins(), buckets)  # fmt: skip
        if captured.watch.communicated:
            follow_program(captured.program)
            _in_order(function, tracing)
        if release is not None and (release.again or captured.watch.parts):
            raise _ReadAgain
        _all_followed(dials, captured, reach)
        for t in captured.watch.written.values():
            if any(t.data_ptr() < at + nbytes and at < t.data_ptr() + t.nbytes for at, nbytes in reach.array_places):
                raise Refusal("writes a tensor that shares memory with an array it can read", "read it as a tensor")
        left: Left = captured.left
        changes = snapshot.changes()  # `self.seen = []` is none
        settings: list[Setting] = []
        if changes and whole and not captured.watch.parts:
            settings = snapshot.settings()
            numbers = [(one.spot.at, one.path) for one in settings if one.number]
            if terms.following.advances(numbers, terms.baked):  # type: ignore[union-attr]
                raise _Advances
            settings = [] if numbers else settings
            for one in settings:
                one.spot.put(one.old)
            changes = snapshot.changes() if settings else changes
        relied = None if changes else _relied(captured, reach, terms.carried)
        changes += left.paths if relied is None else []
        seen = [p.path for p in left.puts if terms.carried.has(p.of, p.name) or p in left.items] if captured.watch.parts else []
        if seen:
            raise Refusal(f"sets {seen[0]}, which what runs live meanwhile may read", "set it outside, or pass it", final=False)
        if changes:
            steps = [name for name in changes if name.endswith(".last_epoch")]
            changes, remedy = (steps, _SCHEDULER) if steps else (changes, _OUTLIVES)
            where = _where_set(changes[0], reach, captured.ran)
            raise Refusal(f"changes {', '.join(changes[:3])}, which outlives the call", remedy, where, final=False)
        captured.watch.handed_out(captured.result)
        for part in captured.watch.parts:
            part.settle(captured.watch.undone)
        touched = captured.watch.touched
        # But forwards and backwards apart leave gradients to autograd, also where `checkpoint`'s code names them.
        named = captured.names_gradients and in_place
        looks, reads = reach.looks_at_gradients or named, reach.mentions.reads_gradients or named
        grads.settle(touched, captured.watch.written.keys(), looks, reads)
        leases: dict[int, Lease] = {}
        leaves: list[Any] = []
        leaves += captured.result
        with _placed(lambda _: returned_at(function)):
            plan = outputs.plan(captured, call, reach, grads, leases, device, leaves, traced=tracing is not None)
        if terms.borrow and tensors_apart(captured.returned.shape):
            raise Refusal("lends a tensor that consists of parts", 'use outputs="keep", or return its parts')
        backward = _backward(function, captured, call, reach, grads, leases, device, leaves, plan, tracing)
        late = [p.path for p in left.items] + [p.path for p in terms.carried.unread() if is_filled(p.of)]
        if backward is not None and backward.function is not None and late:
            raise Refusal(f"sets {late[0]}, and has code that runs in its backward, which may read what was there",
                          "record the whole step")  # fmt: skip
        copied = tuple(leases.pop(key) for key in captured.copied)
        captured.program.copies(outputs.moulds(plan, copied))
        entangled = _entangling(captured.watch, reach, call, left)
        if any(map(entangled.filled.__contains__, map(identity, call.containers))):
            raise Refusal(Entangled.REASON, "pass a copy", this_call=True)
        _separate(call, entangled)
        relied = relied or reach
        if relied is not reach:
            snapshot = Snapshot(relied)
            snapshot.also([*captured.watch.relied_on.values()])
        snapshot.also(reach.packages.after(captured.ran, relied.of_others, relied.foreign))
        if captured.loggers:
            snapshot.also([levels(captured.loggers)])
        moved = {key for key, _ in captured.watch.moved_on()}
        slots = tuple(
            Slot(final, borrowed=b, written=storage_id(used) in captured.watch.written, moved=storage_id(used) in moved)
            for used, final, b in zip(captured.used, captured.slots, fixed, strict=True)
        )
        _no_overlap(call, slots)
        if dials.lost or not (dials.fit() and dials.numbers().keys() <= captured.program.set_numbers(dials.numbers())):
            if not dials.sources:
                raise Refusal("steps an optimizer whose step count cannot be followed on this device", "fused=True",
                              final=False)  # fmt: skip
            raise _Unfollowed(LIVE if any(key in CYCLED for _, key in dials.sources) and not dials.read else ())
        dials.settle()
        if captured.watch.parts and terms.notes is not None and not terms.notes.turned <= dials.followed:
            raise Refusal("calls a function that is marked @pg.live and sets a hyper-parameter which cannot be followed",
                          "set it outside")  # fmt: skip
    set_there = [*dials.advanced, *(one.spot for one in settings)]
    not_heard([*map(identity, left.owners), *(spot.at[0] for spot in set_there)])
    return Recording(
        name=name,
        key=call.key,
        device=device.torch_device,
        program=captured.program,
        slots=slots,
        shape=captured.returned.shape,
        outputs=plan,
        leases=() if terms.borrow else tuple(leases.values()),
        copied=copied,
        footprint=captured.program.footprint | Spans((x.address, x.nbytes) for x in leases.values()),
        reliances=Reliances(relied, snapshot, grads, dials, function.fixed if isinstance(function, Backward) else frozenset()),
        written_outside=_written_outside(captured.watch),
        effects=f"sets {set_there[0].at[1]}" if set_there else _effects(captured.watch, slots, grads, left, captured.returned),
        draws=captured.watch.drew,
        drops_out=captured.watch.drops_out,
        communicates=captured.watch.communicated,
        entangled=entangled,
        lent=Spans(memory_of(s.tensor) for s in slots if s.borrowed and not isinstance(s.tensor, torch.nn.Parameter)),
        borrow=terms.borrow,
        backward=backward,
        reads=function.reads if isinstance(function, Backward) else None,
        releases=frozenset() if release is None else frozenset(release.given),
        live_parts=captured.watch.parts,
        left=left.after(),
        edits=captured.returned.edits,
        gained=captured.returned.gained,
        written=captured.returned.written,
        numbers=captured.numbers,
        settings=tuple(settings),
    )


@contextmanager
def _placed(line_for: Callable[[str], str]) -> Iterator[None]:
    """Within, what is refused without a line gets that for its reason."""
    try:
        yield
    except Refusal as refusal:
        refusal.where = refusal.where or line_for(refusal.reason)
        raise


def _mentioned_at(reach: Reach, reason: str) -> str:
    """Where the user's code names what a reason has in brackets: (retain_grad)."""
    return next(filter(None, map(reach.mentions.read_at, re.findall(r"\((\w+)\)", reason))), "")


def _all_that_ran(function: Any, listener: Any, device: Any) -> Ran | None:
    """The code of all functions that ran, if it is known. It is not of what is compiled, nor, before Python 3.12, of what
    autograd calls on a thread of its own; and what runs in a backward by itself, its forward has chosen."""
    codes = [*listener.ran]
    if isinstance(function, Backward) or ran_compiled(codes):
        return None
    if not HEARS_ALL_THREADS:  # many backwards within each other go on in another thread on the CPU as well
        nested = any(code.co_name == "backward" and is_users(code.co_filename) for code in codes)
        if nested or device.torch_device.type != "cpu":
            return None
    return Ran(codes, listener.elsewhere.values())


def _relied(captured: Any, reach: Reach, carried: Carried) -> Reach | None:
    """That part of what is in reach on which a replay relies; None if it is not known, or lacks something that an operator has
    read."""
    touched = captured.watch.touched
    part = reach.of_what_ran(captured.known, captured.left, carried) if captured.known is not None else None
    if part is None:
        return None
    found = {storage_id(t) for _, t in part.tensors.values()}
    return part if {storage_id(t) for _, t in reach.tensors.values()} & touched <= found else None


def _all_followed(dials: Dials, captured: Any, reach: Reach) -> None:
    """Whether each of the numbers that are to be followed wherever they are read was found wherever it was used.

    Raises:
        Unfollowed: some cannot be.
    """
    if not dials.spots:
        return
    leaves: list[Any] = []
    flatten(captured.result, leaves)
    for leaf in leaves:
        if isinstance(leaf, Followed):
            dials.hands_out(leaf)
    training = all(m.training for m in reach.modules)
    judged(dials, captured.ran, captured.sets_hooks, () if captured.known is not None else reach.met, training)
    if captured.watch.parts:
        dials.stray_all("is read where parts of the function run live")
    if not dials.fit():
        dials.stray_all("is no number that can be worked with")
    if not dials.strays:
        numbers = dials.numbers()
        for n in numbers.keys() - captured.program.set_numbers(numbers):
            dials.stray(dials.formulas[n], "was not found in what an operator launches")
        if captured.program.holds(dials.wide):
            dials.stray_all("is taken by what is no operator")
    if dials.strays.keys() & range(len(dials.given)):
        raise Fixed
    if dials.strays:
        raise Unfollowed({dials.spots[i].at: why for i, why in dials.strays.items()})


def _where_set(path: str, reach: Reach, ran: Iterable[tuple[CodeType, dict[str, Any]]]) -> str:
    """Where the user's code that ran sets what has this path, or a tensor's memory, if there is one such line only."""
    names = [path.rpartition(".")[2], *(["data"] if path in {name for name, _ in reach.tensors.values()} else [])]
    codes = [code for code, _ in ran if is_users(code.co_filename)]
    found = {f"{code.co_filename}:{line}" for name in names for code in codes for line in set_at(code, name)}
    return found.pop() if len(found) == 1 else ""


def settled(tracing: Tracing | None) -> None:
    """To be called when a recording has been made and all else of its capture is gone.

    Raises:
        Refusal: something of it is still there, and the recording must not be used.
    """
    if tracing is not None and tracing.lost():
        raise Refusal(*_KEEPS, final=False)


def _backward(
    function: Any, captured: Any, call: Call, reach: Reach, grads: Grads, leases: dict[int, Lease], device: Any,
    leaves: list[Any], plan: tuple[Output, ...], tracing: Tracing | None,
) -> Backward | None:  # fmt: skip
    """The backward of the results that are attached, if any are."""
    attached = [i for i, output in enumerate(plan) if output.attached]
    if tracing is None or not attached:
        return None
    results = {i: leaf for i, (leaf, output) in enumerate(zip(leaves, plan, strict=True)) if output.kind == "lease"}
    pairs = [(results[i], results[j]) for i in attached for j in results if i != j]
    if any(outputs.overlap(a, b) and (b.requires_grad or share_version(a, b)) for a, b in pairs):
        raise Refusal("returns tensors that overlap, and one has a history", "return a clone of it")
    followed = {key for g in grads.read() if g is not None for key in storages(g)} | tracing.held.keys()
    if any((s := ref()) is not None and s.nbytes() and s._cdata not in followed for ref in captured.others):
        raise Refusal(*_KEEPS, final=False)
    if any(storage_id(t) in tracing.held for t in results.values()):
        raise Refusal("keeps a result for its backward by itself (an attribute of ctx)", "use ctx.save_for_backward")
    for key, t in tracing.held.items():  # it has memory of its own, which each replay writes
        storage = t.untyped_storage()
        where = storage.data_ptr(), storage.nbytes()
        leases[key] = Lease(*where, device.torch_device, (device.anchor(Spans([where])), storage))
    if any(t.requires_grad and storage_id(slot) in captured.watch.written
           for t, slot in zip(call.tensors, captured.used, strict=True)):  # fmt: skip
        raise Refusal("writes an argument that requires a gradient", "write a clone of it")
    if any(
        t.grad_fn is not None and key in captured.watch.touched for key, tensors in tracing.outside.items() for t in tensors
    ):
        raise Refusal("reads a tensor outside that has a history of its own", "pass it as an argument")
    backward = tracing.backward(
        function,
        results,
        attached,
        captured.made,
        lambda key: outputs.lease(key, captured, leases, device),
        captured.sets_hooks,
    )
    if backward.only_captured and backward.recompute.parts and captured.watch.drops_out:
        raise Refusal("recomputes parts in its backward, and has dropout of cuDNN's, which begins anew there",
                      "put nn.Dropout between layers of their own, instead of dropout=")  # fmt: skip
    if backward.function is not None and reach.mentions.reads_gradients:
        raise Refusal("has code that runs in its backward, and may look at gradients, of which eager has added some by then",
                      "record the whole step")  # fmt: skip
    return backward


def _outside(call: Call, reach: Reach) -> dict[int, list[torch.Tensor]]:
    """The tensors that were there before the call, and which no slot stands for, by storage."""
    found: dict[int, list[torch.Tensor]] = defaultdict(list)
    for t in (*(t for _, t in reach.tensors.values()), *(t for t in call.tensors if isinstance(t, torch.nn.Parameter))):
        found[storage_id(t)].append(t)
    return found


# Modules of torch's that prepare a step, and what can be recorded of them.
_PARALLEL = (("torch.distributed.fsdp", "FullyShardedDataParallel", "record parts whose weights are not sharded"),)

# What is not the same for an argument and for the copy of it that a recording works with, or that nobody compares.
_MEMORY = frozenset({"_version", "_base", "_is_view", "storage_offset", "untyped_storage", "is_shared"})


def _check(reach: Reach, call: Call, traced: bool) -> None:
    """Refuse at once what makes a recording impossible, whatever the function does."""
    if reach.iterators:
        trained = "._trainer." in reach.iterators[0]
        raise Refusal(f"uses an iterator ({reach.iterators[0]})",
                      "a LightningModule refers to its trainer: call pg.record on the network in it" if trained else
                      "take the next item outside and pass it as an argument", _read_at(reach, reach.iterators[0]))  # fmt: skip
    if reach.arrays:
        raise Refusal(f"uses an array ({reach.arrays[0]}), which can change without notice",
                      "pass it as a tensor, or let nobody write it: array.setflags(write=False)",
                      _read_at(reach, reach.arrays[0]))  # fmt: skip
    for module, name, remedy in _PARALLEL:
        parallel = getattr(sys.modules.get(module), name, ())
        if any(isinstance(m, parallel) for m in reach.modules):
            raise Refusal(f"contains {name}, which prepares each step outside of what can be captured", remedy)
    if reach.sharded and traced:
        raise Refusal("contains FSDPModule, whose backward cannot be recorded by itself", "call pg.record on the whole step")
    for path, t in reach.gathered:
        if not shards.empty(t):
            raise Refusal(f"begins with a parameter that is gathered ({path})", "call reshard() on the module", this_call=True)
        if t.is_leaf and t.grad is not None:
            raise Refusal(f"begins with a gradient that is not reduced yet ({path})", "record all micro-batches as one step",
                          this_call=True)  # fmt: skip
    if coalesces():
        raise Refusal("is called where collectives are collected, to begin together", "call it outside of that", this_call=True)
    if reach.works:
        raise Refusal(f"can reach a collective that is under way ({reach.works[0]})", "wait for it outside, and drop it",
                      final=False)  # fmt: skip
    theirs = [t for t in call.tensors if not t.is_leaf or t.is_inference() or (traced and t.requires_grad)]
    if reach.mentions.asks_history and theirs:
        raise Refusal("asks where an argument comes from (is_leaf, grad_fn, is_inference)", "pass a detached tensor",
                      _read_at(reach, *sorted(HISTORY)))  # fmt: skip
    for asked in sorted(_MEMORY & reach.mentions.reads):
        if not reach.gives(asked):
            raise Refusal(f"asks what a tensor's memory is like ({asked})", "do that outside, and pass the answer",
                          _read_at(reach, asked))  # fmt: skip
    if parametrizations_are_cached():
        raise Refusal("is called within parametrize.cached(), which keeps tensors from call to call",
                      "call it outside of that context, or enter it inside", this_call=True)  # fmt: skip
    if reach.truncated:
        raise Refusal("can reach more than can be watched", "let it refer to less, or pass what it needs as arguments")
    for name, t in reach.all_tensors:
        if t.is_leaf and t.grad is not None and not all(has_memory(g) or is_shape(g) for g in parts(t.grad)):
            raise Refusal(f"works with a gradient that is not dense (that of {name})", "use dense gradients (sparse=False)")
    if reach.looks_at_gradients and (name := reach.trained_elsewhere):
        raise Refusal(f"may look at the gradient of {name}, a tensor that consists of others",
                      "record what needs no gradients by itself")  # fmt: skip


def _read_at(reach: Reach, *names: str) -> str:
    """Where the user's code reads what has the first of these names that it reads."""
    words = (re.split(r"\W+", name.rstrip("'\"])"))[-1] for name in names)
    return next(filter(None, map(reach.mentions.read_at, words)), "")


def fed(call: Call, device: Any) -> list[torch.Tensor]:
    """The arguments that each replay will copy to a place of its own."""
    return [t for t, fixed in zip(call.tensors, _arguments(call, device, in_place=True)[1], strict=True) if not fixed]


def _arguments(call: Call, device: Any, in_place: bool) -> tuple[list[torch.Tensor], list[bool]]:
    """What the call's tensors are captured with, and which of them stay where they are: parameters, which are state and no
    input, and outputs of earlier recordings, which are read `in_place`. But where forwards wait for their backwards at the same
    time, arguments come from other recordings each time, and one recording that takes copies serves them all."""
    arguments, fixed = [], []
    for t in call.tensors:
        parameter, borrowed = isinstance(t, torch.nn.Parameter), in_place and device.pool.lease_of(t) is not None
        arguments.append(unowned(t) if borrowed and not parameter else t)
        fixed.append(borrowed or parameter)
    return arguments, fixed


def _shared(terms: Terms, device: Any, fixed: list[bool]) -> list[torch.Tensor | None]:
    """Slots that are another recording's as well: a slot is read in the very replay for which it was filled, so that forwards
    that wait for their backwards at the same time need only one. (What is kept of an argument is the argument.)"""
    sibling = terms.sibling
    if sibling is None or not terms.turns or terms.apart or sibling.spoiled:
        return [None] * len(fixed)
    leased = device.pool.leased()
    return [
        slot.tensor if not (f or slot.borrowed or leased.meets(*memory_of(slot.tensor))) else None
        for slot, f in zip(sibling.slots, fixed, strict=True)
    ]


def _written_outside(watch: Any) -> tuple[torch.Tensor, ...]:
    """Tensors outside whose version a replay moves on, as the operators that write them do (but gradients: `Grads` does)."""
    written = [t for key, t in watch.moved_on() if key in watch.outside and not watch.known[key].endswith(".grad")]
    return (*written, *watch.made_moved_on())


def _effects(watch: Any, slots: tuple[Slot, ...], grads: Grads, left: Left, returned: Returned) -> str:
    """What a replay does besides giving results."""
    if returned.edits or returned.gained:
        return "changes a container that is an argument" if returned.edits else "leaves a gradient in an argument"
    if left.paths:
        return f"sets {left.paths[0]}"
    if watch.written:
        name = watch.known.get(next(iter(watch.written)), "")
        return f"writes {name or 'a tensor that outlives the call'}"
    if grads.written or any(slot.written for slot in slots):
        return "changes gradients" if grads.written else "writes an argument"
    return str(watch.more)


class _Unfollowed(Exception):
    """A capture is taken back and made again: some hyper-parameter could not be found in the program. Then only these are
    followed, the common ones, and at last all are baked in."""

    def __init__(self, fewer: tuple[str, ...]) -> None:
        super().__init__()
        self.fewer = fewer


class _Advances(Exception):
    """A capture is taken back and made again: it has advanced numbers, which are to be followed."""


class _ReadAgain(Exception):
    """A capture is taken back and made again: it has read what it had given back, or a replay may have to begin again."""


def _clearance(device: Any, terms: Terms, function: Any) -> tuple[Spans, bool, Release | None]:
    """Which addresses the new recording keeps clear of; whether it hands out copies; and which of them it gives back to itself
    once it has read what is there.

    Sharing memory saves it, at the price that a held output of one recording may be in another's way. While there is
    room, recordings are kept apart altogether. When it is scarce only what is held counts as taken; and where that led
    to a recording being in its own way, the new one keeps clear of every output and never holds one itself. One that is made
    because another has left a tensor in the memory of its predecessor, or hands one out there, keeps `apart` from all: so
    functions that take turns are in nobody's way after one more recording each. A backward that `shares` has room where its
    forward works; nothing else is there when it runs.

    Forwards that wait for their backwards at the same time take `turns`, in an order that is not known yet: each keeps clear of
    all others. Their backwards share what none of them hands out, and hand out copies, because gradients are held for long.
    """
    pool = device.pool
    taken, turns = pool.footprints(), terms.turns or pool.takes_turns
    one_of_many = turns and isinstance(function, Backward)
    release = None
    if isinstance(function, Backward) and not (terms.apart or terms.blocked):
        if function.shares and not turns:
            taken -= function.room
        if function.last and (function.shares or turns) and not terms.retain:
            release = Release(function.releasable)
    everything = taken | pool.protected()
    if terms.apart or (pool.footprints().nbytes <= device.roomy and terms.blocked < _TAKING_TURNS):
        return everything, one_of_many, release
    if terms.tracing is not None and (terms.blocked or turns):
        return everything, True, release
    if one_of_many:
        return pool.leased(), True, release
    return (pool.leased(), True, None) if terms.blocked else (pool.protected(), False, release)


def _capture(
    function: Callable[..., Any], call: Call, reach: Reach, snapshot: Snapshot, device: Any, grads: Grads,
    arguments: list[torch.Tensor], fixed: list[bool], shared: list[torch.Tensor | None], protected: Spans, dials: Dials,
    most: float, terms: Terms, release: Release | None, begins: Starts, buckets: list[torch.Tensor],
) -> Any:  # fmt: skip
    tracing = terms.tracing
    outer = {identity(x) for x in reach.met}
    given: set[int] = set()
    stood: list[torch.Tensor] = []
    ran: list[Iterable[CodeType]] = []
    functions: list[tuple[CodeType, dict[str, Any]]] = []
    loggers: list[Question] = []
    listeners: list[Listener] = []
    left: list[Left] = [Left()]
    returned: list[Returned] = []
    known: list[Ran | None] = [None]
    numbers: list[tuple[int, ...]] = [()]
    watches: list[OperatorWatch] = []
    standing: list[Callable[[], None]] = []

    def run(slots: list[torch.Tensor], watch: Any) -> Any:
        watches.append(watch)
        watch.noticed = said
        watch.warm = terms.ran
        watch.relies = snapshot.also
        watch.outermost = sys._getframe().f_code
        watch.has_backward = tracing is not None or isinstance(function, Backward)
        watch.numerals = [] if terms.numbers else None
        watch.works_in(buckets)
        leaves, seen = list(call.leaves), slots
        for place, number in zip(call.numbers, dials.given, strict=True):
            leaves[place] = number
        if tracing is not None:
            tracing.begin(slots, watch.states, _outside(call, reach))
            watch.met_outside = tracing.met_outside
            seen = [s if isinstance(s, torch.nn.Parameter) else tracing.argument(s) for s in slots]
        seen = [in_inference(s) if t.is_inference() else s for s, t in zip(seen, call.tensors, strict=True)]
        stood[:] = seen
        for i, (place, slot, theirs) in enumerate(zip(call.places, seen, call.tensors, strict=True)):
            if not theirs.requires_grad or theirs is slot:
                leaves[place] = slot
            else:
                leaves[place] = slot.requires_grad_() if tracing is None else tracing.source(i, slot)
        for place, number in call.again:
            leaves[place] = leaves[call.places[number]]
        sets = {identity(x): set(x) for x in leaves if type(x) is set}
        leaves = [sets.get(identity(x), x) for x in leaves]
        built: list[Any] = []
        args, kwargs = unflatten(call.shape, iter(leaves), built)
        opened = opened_in(call.shape)
        held = [entries(c, opened) for c in built]
        sealed = _sealed(built, held)
        given.update(map(identity, sets.values()))
        metadata, modes_before = [_metadata(s) for s in seen], modes()
        saving = nullcontext() if tracing is None else tracing.saving()
        heard = together(watch.frames(), watch.backwards(), begins, tracing.refused() if tracing is not None else {})
        releasing = function.releasing(release, watch) if isinstance(function, Backward) else nullcontext()
        by_name = dict(kwargs)
        standing.append(terms.carried.stand(by_name))
        found_there = before(snapshot.holders)
        with (
            guarding(dials, reach),
            watch.casts.following(),
            saving,
            Cuts(terms.notes, reach, watch, outer, isinstance(function, Backward)),  # which finds that as it is within
            releasing,
            watching_python(outer, heard, reach.caching, reach.left_out, watch) as listener,
        ):
            listeners.append(listener)
            ran.append(listener.ran)
            listener.found = said
            called: Any = function
            state = _state_of(function) if tracing is not None else ()
            if tracing is not None and state:
                called = called.with_state(stands := [*map(tracing.parameter, state)])
            try:
                result = called(*args, **by_name)
            except BaseException as e:
                watch.end_groups()
                # `checkpoint` keeps its contexts in a generator, which ends with the frames: inside of ours, as they began.
                traceback.clear_frames(e.__traceback__)
                noticed = said if isinstance(e, Refusal) else (*said, *filter(None, [listener.overlooked]))
                if noticed and noticed[0] is not e and isinstance(e, Exception) and not isinstance(e, Overlooked):
                    raise noticed[0] from None  # who has caught that made another exception of it (Dynamo does), or logged it
                raise
        dials.left()
        edited = _edits(call, (args, kwargs), leaves, built, held, sealed)
        torch.clear_autocast_cache()  # or it would look as if the function kept what is in it
        for refusal in said:
            raise refusal
        known[0] = all_of_it = _all_that_ran(function, listener, device)
        # What is lent may not stay there; an operator's own code may do so in each replay by itself, and other threads always.
        if all_of_it is not None and alone() and not (terms.borrow or watch.runs_python):
            # Whether it is another tensor of the call's, nobody could say of what stands in for one.
            carried = Carried(learns=False) if reach.mentions.asks_identity else terms.carried
            # Whoever asks where a tensor comes from may look at one that no operator reads.
            handed_on = _memory_in((result, [values for _, values in edited])) if not reach.mentions.asks_history else None
            left[0] = left_by(found_there, all_of_it, carried, watch.touched, handed_on, listener.appended, reach.called,
                              tracing is not None)  # fmt: skip
        filled = {identity(put.of) for put in left[0].items}
        for refusals in (calls for key, calls in listener.changed.items() if key not in filled):
            raise refusals[0]
        standing.pop()()
        if left[0].puts:
            once = [*map(identity, chain.from_iterable(containers(x) for x in (result, *[put.new for put in left[0].puts])))]
            if len({*once}) < len(once) or not outer.isdisjoint({*once} - filled):
                raise Refusal(f"keeps a container in {left[0].paths[0]} that is found elsewhere as well", "use a new one")
            result = (result, [put.new for put in left[0].puts])
            left[0] = left[0].after()
        edits = [edit for edit, _ in edited]
        if edits:
            result = (result, [values for _, values in edited])
        edited.clear()
        gained = _gained(call, seen) if tracing is None else []
        if gained:
            result = (result, [seen[i].grad for i in gained])
            for i in gained:
                seen[i].grad = None
        wait_for_all(_leaves(result))  # only then each is known for what it is
        result, read = without(result, {*map(identity, built)})
        made_grads = {identity(g) for g in grads.read() if g is not None and not is_ordinary(g)}
        returned.append(Returned.of(result, edits, gained, built, outer | made_grads, filled))
        result = returned[0].leaves
        numbers[0] = tuple(i for i, leaf in enumerate(result) if any(leaf is t for t in read))
        if any(ref() is not None for ref in watch.numerals or ()):
            raise Refusal("keeps a number that it reads of a tensor (item)", "return it, or keep the tensor")
        functions.extend(listener.functions())
        loggers.extend(listener.loggers.values())
        dials.ran(listener.ran)
        overlooked = listener.overlooked or reach.overlooked(listener.ran)
        if overlooked is not None:
            raise overlooked
        if modes() != modes_before:
            raise Refusal("changes a mode or setting of the process for good", "use it as a context manager (with ...)")
        _arguments_are_as_before(call, sets, seen, metadata)
        if tracing is not None:
            tracing.ended(result, listener.ran, watch.outside, reach.mentions.names)
        return _with(result, seen, slots) if not state else _with(result, [*seen, *stands], [*slots, *state])

    def leaving(result: Any) -> list[torch.Tensor]:
        leaves: list[Any] = []
        flatten(result, leaves)
        staying = {key for g in grads.read() if g is not None for key in storages(g)}
        return [x for x in leaves if isinstance(x, torch.Tensor) and _ordinary(x) and storage_id(x) not in staying]

    said: list[Refusal] = []
    _recording.append((threading.get_ident(), said))
    try:
        kept = tracing.kept if tracing is not None else list
        rewind = function.recompute.rewind if isinstance(function, Backward) else None
        with transforms_undone(lambda: chain(*ran)):
            plan = CapturePlan(
                call=run, results=leaving, saved=kept, reach=reach, dials=dials, arguments=arguments, borrowed=fixed,
                shared=shared, protected=protected, releasable=() if release is None else release.places,
                expected=terms.expected, copied=most, rewind=rewind,
            )  # fmt: skip
            captured = device.capture(plan)
        backward = any(code.co_name == BACKWARD for code in chain(*ran))
        sets_hook = inspect.unwrap(torch.Tensor.register_hook)  # `witness` stands before it, and before others
        hooks = sets_hook.__code__ in chain(*ran) or any("hook" in name for name in reach.mentions.names)
        named = any("grad" in code.co_names for code in chain(*ran))
        captured = captured._replace(containers=frozenset(given), returned=returned[0], numbers=numbers[0])
        return captured._replace(ran_backward=backward, sets_hooks=hooks, names_gradients=named,
                                 seen=tuple(stood), ran=functions, loggers=loggers, left=left[0], known=known[0])  # fmt: skip
    except Refusal as refusal:
        refusal.places = [levels(listener.loggers.values()) for listener in listeners]
        raise
    except (Overlooked, Carries, Opens, KeyboardInterrupt):
        raise
    except BaseException as e:  # SystemExit and the like: effects before it are the live run's
        if any(first in str(e) for first in device.first_uses):
            raise Unseen("uses a library of CUDA's for the first time", "call it once before", final=False) from e
        raise _failed(e, watches[-1].failed if watches else None, device.failures) from e
    finally:
        _recording.pop()
        for put_back in standing:
            put_back()
        if grads.shared and not _may_change_gradients(chain(*ran), reach):
            grads.leave_alone()


_SETTERS = frozenset({"setattr", "__setattr__", "delattr", "__delattr__"})


def _may_change_gradients(ran: Iterable[CodeType], reach: Reach) -> bool:
    """Whether a call may have given parameters other gradients, going by the code that ran."""
    asks = reach.looks_at_gradients or reach.mentions.reads_gradients or reach.mentions.looks_around
    return asks or any(c.co_name == BACKWARD or "grad" in c.co_names or not _SETTERS.isdisjoint(c.co_names) for c in ran)


def _in_order(function: Any, tracing: Tracing | None) -> None:
    """What communicates in a backward does so between the averages of a wrapper around it; recorded, before all of them. A rank
    that runs live would meet another's with its own."""
    refusal = Refusal("lies in DistributedDataParallel, and communicates with other ranks as well: in a recorded backward that "
                      "would come before all averages", "record the whole step")  # fmt: skip
    if tracing is not None and averaging() is not None:
        raise refusal
    if isinstance(function, Backward) and function.averaged:
        function.stop(refusal)


def _state_of(function: Any) -> Sequence[Any]:
    """The parameters and buffers of a function of our own that calls a graph, which gets them as arguments."""
    return function.state if _is_graph(function) else ()


def _is_graph(function: Any) -> bool:
    return type(function).__module__.startswith("phonograph.") and hasattr(function, "with_state")


def _with(result: Any, seen: list[torch.Tensor], slots: list[torch.Tensor]) -> Any:
    """The same result, with the slots themselves where it has what the call saw of them."""
    leaves: list[Any] = []
    shape = flatten(result, leaves)
    own = {identity(t): slot for t, slot in zip(seen, slots, strict=True) if t is not slot}
    if own.keys().isdisjoint(map(identity, leaves)):
        return result
    return unflatten(shape, iter([own.get(identity(leaf), leaf) for leaf in leaves]))


def _metadata(t: torch.Tensor) -> tuple[Any, ...]:
    hooks = len(t._backward_hooks or ()), len(getattr(t, "_post_accumulate_grad_hooks", None) or ())
    return (t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad, t.grad_fn, hooks, attributes(t))


def _edits(
    call: Call, args: Any, leaves: list[Any], built: list[Any], held: list[dict[Any, Any] | None], sealed: list[Any]
) -> list[tuple[Edit, list[Any]]]:  # fmt: skip
    """What the call has done to its arguments' containers, which are these, and what each `held`; with the new values.

    Raises:
        Opens: it is to be looked for in attributes of objects of these classes.
    """
    now: list[Any] = []
    shut, opened = {identity(x) for x in call.leaves if not isinstance(x, torch.Tensor)}, opened_in(call.shape)
    shape = flatten(args, now, Opening(shut, by_attributes=opened))
    if shape == call.shape and len(now) == len(leaves) and all(map(is_, now, leaves)):
        return []
    found = []
    for i, (container, then) in enumerate(zip(built, held, strict=True)):
        after = entries(container, opened)
        edit = Edit.between(i, then, after, opened) if then is not None and after is not None else None
        if edit is not None and after is not None:
            found.append((edit, [after[at] for at in edit.new]))
    unlike = [c for c, a, b in zip(built, sealed, _sealed(built, held), strict=True) if a != b]
    if kinds := {type(c) for c in unlike if goes_by_pytree(c)} - opened:
        raise Opens(kinds)
    if unlike or not found:
        raise Refusal("changes a container that is an argument", "return the new value")
    return found


def _sealed(built: list[Any], held: list[dict[Any, Any] | None]) -> list[Any]:
    """What those containers have in them that can change, and not by what they hold."""
    others = {identity(c) for c in built}
    found = []
    for c, holds in zip(built, held, strict=True):
        leaves: list[Any] = []
        shape = flatten(c, leaves, Opening(others - {identity(c)})) if holds is None and not isinstance(c, tuple) else None
        found.append((shape, [*map(identity, leaves)]))
    return found


def _leaves(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    flatten(tree, leaves)
    return leaves


def _memory_in(tree: Any) -> set[int] | None:
    """The storages of the tensors in what a call hands on, None if there may be any."""
    leaves: list[Any] = []
    try:
        flatten(tree, leaves, Opening())
    except RecursionError:
        return None
    return {storage_id(t) for t in leaves if isinstance(t, torch.Tensor) and has_memory(t)}


def _gained(call: Call, slots: list[torch.Tensor]) -> list[int]:
    """Which arguments have a gradient now: they had none, or would stand for themselves. (What stands for one with a history is
    a leaf as well, but the gradient is not for that: a backward goes on from there.)"""
    leaves = [(i, t) for i, (t, given) in enumerate(zip(slots, call.tensors, strict=True)) if given.is_leaf]
    return [i for i, t in leaves if type(t) is torch.Tensor and t.is_leaf and t.requires_grad and t.grad is not None]


def _arguments_are_as_before(call: Call, sets: dict[int, set[Any]], slots: list[torch.Tensor], before: list[Any]) -> None:
    """A function may write into its arguments, and change containers; what else it does to them cannot be repeated for the
    caller."""
    if any(sets[identity(x)] != x for x in call.leaves if type(x) is set):
        raise Refusal("changes a container that is an argument", "return the new value")
    for slot, was in zip(slots, before, strict=True):
        if _metadata(slot) != was:
            raise Refusal("changes what an argument is (its shape, its history, hooks, attributes)", "use a new tensor instead")
        if type(slot) is torch.Tensor and slot.requires_grad and slot.grad is not None:
            raise Refusal("accumulates a gradient in an argument", "use torch.autograd.grad and return the gradient")


def _ordinary(t: torch.Tensor) -> bool:
    return type(t) in (torch.Tensor, torch.nn.Parameter) and has_memory(t)


def _failed(e: BaseException, operator: Any, failures: Sequence[Failure]) -> Refusal:
    """Why a call is refused whose capture an exception has ended, perhaps one that an operator has raised."""
    line, source, direct = innermost(e.__traceback__)
    said = naming(written(operator.name()) if operator is not None else "", source, direct=direct)
    first = re.sub(r" (object )?at 0x[0-9a-f]+", "", str(e).strip().split("\n", 1)[0]) or type(e).__name__
    unknown = (f'{said or "it"} fails while it is captured, and not in a live call: "{first}"', _ELSEWHERE)
    reason, remedy = failure(e, said, failures) or unknown
    return Refusal(reason, remedy, line, final=False, failed=True, operator=operator)


def _no_overlap(call: Call, slots: tuple[Slot, ...]) -> None:
    """Separate slots cannot stand for arguments that share memory, if one of them is written."""
    spans = [Spans([memory_of(t)]) for t in call.tensors]
    for i, slot in enumerate(slots):
        if slot.written and any(j != i and span.meets(*memory_of(call.tensors[i])) for j, span in enumerate(spans)):
            raise Refusal("writes an argument that shares memory with another argument", "pass separate tensors")


def _separate(call: Call, entangled: Entangled) -> None:
    """A slot cannot stand for an argument that shares memory with a tensor outside, if either is written."""
    if any(entangled.meets(t) for t in call.tensors):
        raise Refusal(Entangled.REASON, "pass a clone", this_call=True)


def _entangling(watch: Any, reach: Reach, call: Call, left: Left) -> Entangled:
    """Storages outside that no argument may share: those written; all, if an argument is written."""
    storages = {key: t.untyped_storage() for key, t in watch.written.items() if key not in watch.slot_ids}
    if not watch.written.keys().isdisjoint(watch.slot_ids):
        tensors = [t for _, t in reach.tensors.values() if has_memory(t)]
        tensors += parts_of_all(t.grad for _, t in reach.all_tensors if t.is_leaf)
        known = watch.known.keys() - watch.slot_ids
        storages |= {key: t.untyped_storage() for t in tensors if (key := storage_id(t)) in known}
    marked = [("", f.function) for part in watch.parts if isinstance(f := part.form.operator, Marked)]
    theirs = [t for _, t in Reach(marked).tensors.values()] if marked else []  # a marked function may read and write them
    storages |= {storage_id(t): t.untyped_storage() for t in theirs if has_memory(t)}
    tensors = [t for _, t in reach.tensors.values()] if reach.mentions.asks_identity else []
    given = {identity(x) for x in call.leaves}
    objects = [x for x in reach.met if layout_of(type(x)) is not None and identity(x) not in given]
    return Entangled(tensors, storages.values(), objects, [put.of for put in left.items])


@contextmanager
def _transaction(reach: Reach, grads: Grads) -> Iterator[Snapshot]:
    host, snapshot, settings = _HostRandom(reach), Snapshot(reach), modes()
    torch.clear_autocast_cache()
    try:
        yield snapshot
        host.restore(changed="draws random numbers on the host (random or numpy.random)", where=_draws_at(reach))
    except BaseException:
        snapshot.restore()
        reach.packages.restore()
        grads.restore()
        host.restore()
        put_back(settings)
        raise
    finally:
        torch.clear_autocast_cache()


class _HostRandom:
    """The states of Python's and NumPy's random generators before a capture. Most draws from Python's are heard and refused
    before they happen; here is what draws, or seeds, unheard. NumPy's are moved on first: code that seeds and then draws leaves
    the state that it has left in the call before."""

    def __init__(self, reach: Reach) -> None:
        self._python = [(r, r.getstate()) for r in (random._inst, *reach.host_rngs) if isinstance(r, random.Random)]
        numpy: Any = sys.modules.get("numpy.random")
        legacy = [r for r in reach.host_rngs if hasattr(r, "get_state")] + ([numpy] if numpy is not None else [])
        self._legacy = [(r, r.get_state(legacy=False)) for r in legacy]
        bits = [getattr(r, "bit_generator", r) for r in reach.host_rngs]
        self._bits = [(b, b.state) for b in bits if hasattr(b, "random_raw")]
        for r, _ in self._legacy:
            r.bytes(1)
        for b, _ in self._bits:
            b.random_raw()
        self._moved = self._numpys()

    def _numpys(self) -> list[Any]:
        return [r.get_state(legacy=False) for r, _ in self._legacy] + [b.state for b, _ in self._bits]

    def restore(self, changed: str | None = None, where: str = "") -> None:
        """Put back the states that have moved on; with `changed`, raise that as a refusal."""
        alone = threading.active_count() == 1  # if not, another thread has drawn from Python's
        python = [(r, state) for r, state in self._python if alone and r.getstate() != state]
        used = bool(python) or not all(map(_same_state, self._numpys(), self._moved))
        for r, state in python:
            r.setstate(state)
        for r, state in self._legacy:
            r.set_state(state)
        for b, state in self._bits:
            b.state = state
        if changed and used:
            raise Refusal(changed, "draw them outside and pass them as arguments, or use torch's generators", where,
                          final=False)  # fmt: skip


def _draws_at(reach: Reach) -> str:
    """Where the user's code calls a method of NumPy's generators, if there is one such line only."""
    kinds = (getattr(sys.modules.get("numpy.random"), kind, object) for kind in ("Generator", "RandomState"))
    names = {"random", *(name for kind in kinds for name in vars(kind) if not name.startswith("_"))}
    found = {reach.mentions.read_at(name) for name in names & reach.mentions.names} - {""}
    return found.pop() if len(found) == 1 else ""


def _same_state(a: Any, b: Any) -> bool:
    """Whether two states of a NumPy generator are equal: dictionaries of numbers and arrays."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same_state(a[k], b[k]) for k in a)
    return bool(a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else a == b)
