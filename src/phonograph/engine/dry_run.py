"""Dry run: a call inside of a device's capture.

The device notes operators and executes none. Python code does run, so each of its effects is heard (`watching_python`), and
what it leaves in attributes is taken away again: the replay that follows puts it there. The dry run gives one flat list of
leaves, all that a replay hands out or puts somewhere, in this order: the function's own result, tensors for attributes, values
for the arguments' containers, gradients of arguments.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

import torch

from .._torch.autograd import in_inference
from .._torch.dynamic import Leaves, Thing
from .._torch.dynamo import ran_compiled
from .._torch.modes import transforms_undone
from .._torch.process_groups import wait_for_all
from .._torch.tensors import has_memory, is_ordinary, storage_id
from ..aten.products import products_as_without_mode
from ..call.signature import Call, modes
from ..capture.dispatch import OperatorWatch
from ..capture.effects import together
from ..capture.python_events import HEARS_ALL_THREADS, Listener, alone, watching_python
from ..capture.skipped_steps import skipping_on_the_device
from ..devices.base import CapturePlan
from ..devices.cuts import Cuts
from ..errors import NotPutBack, Overlooked, Refusal, Unseen
from ..guards.attribute_effects import Found as Attributes
from ..guards.attribute_effects import Left, before, left_by
from ..guards.beyond import LeftOut
from ..guards.carried_state import Carried, Carries, tensors_in
from ..guards.followed_numbers import Fixed, guarding
from ..guards.hyperparameters import Dials
from ..guards.reachable import Reach
from ..python.executed_code import Ran
from ..python.identity import identity
from ..python.loggers import levels
from ..python.origin import BACKWARD
from ..python.putting_back import put_back
from ..python.read_gate import Reads
from ..slots.fed_gradients import hands_on
from ..values.container_edits import Edit
from ..values.host_scalars import Numeral, without
from ..values.pytree import Flattener, Opens, containers, contains_itself, flatten, unflatten
from ..values.pytree_paths import attributes_of
from ..values.tensor_subclasses import storages
from ..values.texts import Text, held, may_miss
from ..values.wording import MARKED, failure, first_line, innermost, naming
from ..values.wording import operator as written
from .call_arguments import Arguments
from .capture_terms import Advances, Request
from .current_capture import capturing
from .evidence import Behaviour, CodeThatRan, Evidence
from .prepared import Prepared
from .returned import Given, Returned
from .touches import Touches

__all__ = ["DryRun"]

_ELSEWHERE = f"call it outside the recorded function, {MARKED}"
_SETTERS = frozenset({"setattr", "__setattr__", "delattr", "__delattr__"})


class _Effects(NamedTuple):
    """What a call has done besides giving a result."""

    known: Ran | None
    """All code that ran, if that is certain."""
    left: Left
    filled: set[int]
    """The identities of the containers that it fills."""
    edits: list[Edit]
    """Changes of containers among the arguments."""
    gained: list[int]
    """Arguments that have gained a gradient."""
    turned: tuple[int, ...]
    """Arguments that require a gradient now."""


class _Text(NamedTuple):
    """A string among the arguments: the leaf at this place, an attribute of an object."""

    place: int
    of: object
    name: str


class DryRun:
    """One capture of a call on its device. No field holds a tensor that the call may have made while it runs: what is still
    there when it has ended, the call itself keeps."""

    def __init__(self, request: Request, prepared: Prepared, dials: Dials) -> None:
        self._request, self._prepared, self._dials = request, prepared, dials
        self._outer = {identity(x) for x in request.reach.met}
        self._refused: list[Refusal] = []  # in code that may have caught it
        self._unread: dict[int, Any] = {}  # by its place, what stands for a string; in an audit the string
        self._stand_ins = ExitStack()  # puts back what was in the places of carried state
        self._watch: OperatorWatch | None = None
        self._listener: Listener | None = None
        self._behaviour: Behaviour | None = None
        backward = request.backward is not None
        self._compares = self._audits and (backward or not request.reach.unwatchable)  # (which an audit must not touch either)
        followed = [spot.at for spot in prepared.spots if spot.kind is not None]
        counts = not backward and (followed or not self._compares)
        self._reads = Reads(request.reach.objects, followed) if counts else None
        self._untouched = Touches(request.reach, self._reads, request.device.torch_device, self._refused)

    def capture(self, most: float) -> Evidence:
        """Capture the call. Results of at most so many bytes in all are copied out by each replay.

        Raises:
            Refusal: the call cannot be captured; or whatever else has ended it, in words.
        """
        try:
            with self._undone(), self._stand_ins, capturing(self._refused), transforms_undone(self._codes):
                captured = self._request.device.capture(self._plan(most))
            assert self._behaviour is not None
            return Evidence(captured, self._behaviour, self._dials)
        except Refusal as refusal:
            keeper = self._watch.keeper if self._watch is not None else None
            if keeper is not None and identity(keeper) not in self._outer:
                raise Overlooked(frozenset(), [keeper]) from None
            refusal.places = [levels(self._listener.loggers.values())] if self._listener is not None else []
            raise
        except (Advances, Overlooked, Carries, Opens, NotPutBack, KeyboardInterrupt):
            raise
        except BaseException as e:  # SystemExit and the like: effects before it are the live run's
            if self._unread and not self._audits and isinstance(e, TypeError):  # of code in C that takes strings only
                raise Fixed(texts=self._unread) from None
            raise self._failed(e) from e
        finally:
            grads = self._prepared.grads
            if grads.shared and not _may_change_gradients(self._codes(), self._request.reach):
                grads.leave_alone()

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """An exception in the block lets what the call has written have its versions again, and the watch nothing of it."""
        try:
            yield
        except BaseException:
            if self._watch is not None:
                put_back(self._watch.roll_back)
            raise

    def _plan(self, most: float) -> CapturePlan:
        tracing, backward = self._request.tracing, self._request.backward
        slots, release = self._prepared.slots, self._prepared.clearance.release
        return CapturePlan(
            call=self._run,
            results=self._leaving,
            saved=tracing.kept if tracing is not None else list,
            reach=self._request.reach,
            dials=self._dials,
            arguments=slots.arguments,
            borrowed=slots.fixed,
            shared=slots.shared,
            protected=self._prepared.protected,
            releasable=release.places if release is not None else (),
            expected=self._request.terms.placement.expected,
            copied=most,
            true_edges=self._request.terms.true_edges,
            rewind=backward.recompute.rewind if backward is not None else None,
        )

    def _codes(self) -> Collection[CodeType]:
        return self._listener.ran if self._listener is not None else ()

    def _failed(self, e: BaseException) -> Refusal:
        """Why a call is refused whose capture an exception has ended, perhaps one that an operator has raised."""
        device = self._request.device
        if any(first in str(e) for first in device.first_uses):
            return Unseen("uses a library of CUDA's for the first time", "call it once before", final=False)
        operator = self._watch.failed if self._watch is not None else None
        if self._watch is not None and self._watch.would_refuse and Numeral.__name__ in str(e):
            refusal = self._watch.would_refuse[0]  # code in C that knows no such number
            refusal.cutting = True
            return refusal
        line, source, direct = innermost(e.__traceback__)
        said = naming(written(operator.name()) if operator is not None else "", source, direct=direct)
        unknown = (f'{said or "it"} fails while it is captured, and not in a live call: "{first_line(e)}"', _ELSEWHERE)
        reason, remedy = failure(e, said, device.failures) or unknown
        if isinstance(e, (MemoryError, torch.OutOfMemoryError)):
            operator = None  # which is nothing that cannot be captured
        return Refusal(reason, remedy, line, final=False, failed=True, operator=operator)

    # -- inside of the capture

    def _run(self, slots: list[torch.Tensor], watch: OperatorWatch) -> Leaves:
        """Run the call with these slots. Returns the leaves of its result.

        From where a number in the result is replaced by its tensor (`without`), nothing here may hold the number: what is still
        there then, the call keeps."""
        request, tracing = self._request, self._request.tracing
        self._prepare(watch)
        if request.terms.digest is not None:
            watch.digest = request.terms.digest()
            watch.origins.wanted = not watch.digest.compares
            watch.digest.begin(watch.name_of, self._dials, slots)
        seen = self._seen(slots, watch)
        leaves = self._leaves(seen)
        given = [leaves[place] for place in request.call.places]
        pairs = zip(given, request.call.tensors, strict=True)
        watch.histories.end_there([t for t, theirs in pairs if t.requires_grad and theirs.grad_fn is not None])
        arguments = Arguments(request.call, leaves, seen)
        texts = self._texts(arguments)
        modes_before, by_name = modes(), dict(arguments.kwargs)
        self._stand_ins.callback(request.terms.carried.stand(by_name))
        watch.stood_in()
        found = before(self._prepared.snapshot.holders)
        times = held(self._unread.values())
        result, state, listener = self._call(arguments, by_name, watch)
        more = [now - then for now, then in zip(held(self._unread.values()), times, strict=True)]
        lasting = self._kept(more, result, arguments)
        apart = self._dials.left()
        result, effects = self._with_effects(result, arguments, found, watch, listener)
        _none_read(texts, effects.known)
        self._none_noted(lasting, effects.known, listener)
        wait_for_all(_leaves_of(result))  # only then each is known for what it is
        result, read, later, reckoned = without(result, {*map(identity, arguments.built)}, apart)
        del apart
        returned = self._returned(result, effects, arguments.built)
        result = returned.leaves
        reckoned = reckoned.of_leaves(result, later) if reckoned is not None else None
        fed = self._prepared.grads.fed
        if fed is not None and not fed.storages.isdisjoint(storage_id(t) for t in _tensors_in(result) if has_memory(t)):
            raise hands_on()
        numbers = tuple(i for i, leaf in enumerate(result) if any(leaf is t for t in read))
        if any(ref() is not None for ref in watch.numerals or ()):
            self._follow_unread()
            kept = Refusal("keeps a number that it reads of a tensor (item)", "return it, or keep the tensor")
            kept.cutting = True
            raise kept
        watch.check_left(t for t in (*result, *self._prepared.grads.read()) if isinstance(t, torch.Tensor))
        self._check(arguments, modes_before, listener)
        if watch.digest is not None:
            leaves = [identity(x.thing) if type(x) is Given else x for x in result]
            leaves += [reckoned.text] if reckoned is not None else []
            watch.digest.end(returned.shape, leaves, watch.kernels())
        if tracing is not None:
            tracing.ended(result, listener.ran, watch.outside, request.reach.mentions.names)
        watch.check_heard()
        code = CodeThatRan.heard(listener, effects.known, request.reach.mentions.names)
        self._behaviour = Behaviour(code, tuple(given), arguments.copied(), returned, numbers, reckoned, effects.left)
        return _with_slots(result, [*zip(seen, slots, strict=True), *zip(given, slots, strict=True), *state])

    def _follow_unread(self) -> None:
        """Follow what has stood where there are numbers now that are known only when a replay has run.

        Raises:
            Advances: that could be followed.
        """
        terms = self._request.terms
        unread = self._prepared.snapshot.unread() if self._request.whole else []
        if terms.following is not None and terms.following.advances(unread, terms.concessions.baked):
            raise Advances

    def _prepare(self, watch: OperatorWatch) -> None:
        """Tell the watch what the call is like."""
        self._watch, terms = watch, self._request.terms
        watch.noticed = self._refused
        watch.warm, watch.insists = terms.ran, terms.insists
        watch.relies = self._prepared.snapshot.also
        watch.has_backward = not self._request.whole
        watch.may_begin_again = self._request.backward is None
        watch.varying = terms.varying
        if terms.following is not None and self._request.whole:
            watch.may_follow = partial(terms.following.may_want, baked=terms.concessions.baked)
        watch.numerals, watch.steps_whole = [] if terms.numbers is not None else None, terms.steps_whole
        self._dials.reads_later = watch.read_later if watch.numerals is not None else None
        watch.would_refuse = terms.numbers if terms.numbers is not None else []
        watch.works_in(self._prepared.buckets)
        if self._request.backward is not None and self._request.backward.origins is not None:
            watch.origins.follows(self._request.backward.origins)

    def _seen(self, slots: list[torch.Tensor], watch: OperatorWatch) -> list[torch.Tensor]:
        """The tensors that stand for the slots."""
        call, tracing, seen = self._request.call, self._request.tracing, slots
        if tracing is not None:
            tracing.begin(slots, watch.states, _outside(call, self._request.reach))
            watch.met_outside = tracing.met_outside
            seen = [s if isinstance(s, torch.nn.Parameter) else tracing.argument(s) for s in slots]
        return [in_inference(s) if t.is_inference() else s for s, t in zip(seen, call.tensors, strict=True)]

    def _leaves(self, seen: list[torch.Tensor]) -> Leaves:
        """The leaves of the arguments, with these tensors."""
        call, tracing, leaves = self._request.call, self._request.tracing, list(self._request.call.leaves)
        for place, number in zip(call.numbers, self._dials.given, strict=True):
            leaves[place] = number
        for i, (place, t, theirs) in enumerate(zip(call.places, seen, call.tensors, strict=True)):
            if not theirs.requires_grad or theirs is t:
                leaves[place] = t
            else:
                leaves[place] = t.requires_grad_() if tracing is None else tracing.source(i, t)
        for place, number in call.again:
            leaves[place] = leaves[call.places[number]]
        if call.texts:
            owners = attributes_of(call.shape)
            self._unread = {
                place: leaves[place] if self._audits else Text(leaves[place]) for place in call.texts if owners[place] is None
            }
            for place, text in self._unread.items():
                leaves[place] = text
        return leaves

    @property
    def _audits(self) -> bool:
        return self._request.terms.placement.within is not None

    def _kept(self, more: Sequence[int], result: object, arguments: Arguments) -> Sequence[int]:
        """How often the call has kept what stands for a string, each of which is held so many times `more` than before: but for
        those in its result. (A container that is there twice holds one once.)"""
        if not self._unread or self._audits or contains_itself(result):
            return more
        flattener, leaves = Flattener({*map(identity, arguments.built)}), list[object]()
        flattener.flatten(result, leaves)
        if len({*map(identity, flattener.containers)}) < len(flattener.containers):
            return more
        returned = Counter(identity(x) for x in leaves if type(x) is Text)
        return [n - returned[identity(text)] for n, text in zip(more, self._unread.values(), strict=True)]

    def _none_noted(self, kept: Sequence[int], known: Ran | None, listener: Listener) -> None:
        """Whether the call has read none of the strings for which something stands, and has kept none. (An audit notes
        nothing.)

        Raises:
            Fixed: it may have read some.
        """
        if not self._unread or self._audits:
            return
        unknown = known is None or may_miss([code for code, _ in listener.functions()])
        texts = zip(self._unread.items(), kept, strict=True)
        if read := [place for (place, text), n in texts if unknown or text.was_read() or n > 0]:
            raise Fixed(texts=read)

    def _texts(self, arguments: Arguments) -> list[_Text]:
        """The strings in attributes that the call is not to read, which is noted from now on. (An audit notes nothing.)

        Raises:
            Fixed: that cannot be noted.
        """
        call = self._request.call
        if len(call.texts) == len(self._unread) or self._audits:
            return []
        if self._reads is None:
            raise Fixed(texts=call.texts)
        owners = attributes_of(call.shape)
        texts = [_Text(at, arguments.built[owner[0]], owner[1]) for at in call.texts if (owner := owners[at]) is not None]
        self._reads.also([text.of for text in texts])
        return texts

    def _call(
        self, arguments: Arguments, kwargs: dict[str, object], watch: OperatorWatch
    ) -> tuple[Thing, list[tuple[torch.Tensor, torch.Tensor]], Listener]:
        """Call the function where its effects are heard. Returns its result; pairs of a tensor that stood for a parameter of a
        graph, and that; and who has listened."""
        request, prepared, reach = self._request, self._prepared, self._request.reach
        called: Thing = request.function
        tracing, backward = request.tracing, request.backward
        refused = tracing.refused() if tracing is not None else {}
        heard = together(watch.frames(), watch.hooks(), watch.histories.backwards(watch.is_outside), prepared.begins, refused)
        state = called.state if tracing is not None and request.calls_graph else ()
        stands: list[torch.Tensor] = []
        variables = self._untouched if self._untouched.some else None
        watch.outermost = sys._getframe().f_code
        beyond = prepared.beyond
        left_out = self._untouched.left_out if self._compares else self._heard_of(arguments)
        cuts = Cuts(request.terms.notes, reach, watch, self._outer, backward is not None)
        with (
            guarding(self._dials, reach),
            watch.casts.following(),
            products_as_without_mode(),
            skipping_on_the_device(watch),
            nullcontext() if tracing is None else tracing.saving(),
            cuts,  # which finds that as it is within
            nullcontext() if backward is None else backward.releasing(prepared.clearance.release, watch),
            nullcontext() if self._reads is None else self._reads.noting(),
            nullcontext() if self._compares else beyond.noting(called),
            watching_python(self._outer, heard, reach.caching, left_out, watch, None, variables) as listener,
        ):
            if not self._compares:
                beyond.goes_with(sys.getprofile(), listener.collecting)
            self._listener, listener.found = listener, self._refused
            self._untouched.heard_by(listener)
            listener.reads_past = None if self._reads is None else self._reads.read_past
            if tracing is not None and state:
                stands += map(tracing.parameter, state)
                called = called.with_state(stands)
            try:
                result = called(*arguments.args, **kwargs)
            except BaseException as e:
                watch.end_groups()
                # `checkpoint` keeps its contexts in a generator, which ends with the frames: inside of ours, as they began.
                traceback.clear_frames(e.__traceback__)
                told = self._refused
                noticed = told if isinstance(e, Refusal) else (*told, *filter(None, [listener.overlooked]))
                if noticed and noticed[0] is not e and isinstance(e, Exception) and not isinstance(e, Overlooked):
                    for one in (*noticed, e):
                        one.__traceback__ = None  # which would keep what the capture has made, in a cycle
                    raise noticed[0] from None  # who has caught that made another exception of it (Dynamo does), or logged it
                raise
        return result, [*zip(stands, state, strict=True)], listener

    def _heard_of(self, arguments: Arguments) -> LeftOut:
        """What is to be told of each function that starts, where what is read is noted as well."""
        terms = self._request.terms
        return self._prepared.beyond.hears(self._untouched.left_out, terms.carried, arguments.built)

    # -- after the call, still inside of the capture

    def _with_effects(
        self, result: object, arguments: Arguments, found: Attributes, watch: OperatorWatch, listener: Listener
    ) -> tuple[object, _Effects]:
        """A result together with the tensors that the call leaves elsewhere; they are taken away from there."""
        if contains_itself(result):
            raise Refusal("returns a container that contains itself", "return what is in it")
        edited = arguments.edits()
        torch.clear_autocast_cache()  # or it would look as if the function kept what is in it
        for refusal in self._refused:
            raise refusal
        known = self._all_that_ran(listener)
        left = self._left(found, known, (result, [values for _, values in edited]), watch, listener)
        filled = self._restored(left, listener)
        if left.puts:
            self._own_memory(left)
            self._made_by_call(left, filled)
            result, left = (result, [put.new for put in left.puts]), left.after()
        if edited:
            result = (result, [values for _, values in edited])
        gained = list[int]()
        if self._request.tracing is None:
            arguments.turn()
            gained = arguments.gained()
        if gained:
            result = (result, arguments.take_gradients(gained))
        return result, _Effects(known, left, filled, [edit for edit, _ in edited], gained, arguments.turned)

    def _all_that_ran(self, listener: Listener) -> Ran | None:
        """The code of all functions that ran, if it is known. It is not of what is compiled, nor, before Python 3.12, of what
        autograd calls on a thread of its own; and what runs in a backward by itself, its forward has chosen."""
        codes = [*listener.ran]
        if self._request.backward is not None or ran_compiled(codes):
            return None
        # Many backwards within each other go on in another thread on the CPU as well.
        elsewhere = listener.backward_of_users or self._request.device.torch_device.type != "cpu"
        if elsewhere and not HEARS_ALL_THREADS:
            return None
        return Ran(codes, listener.elsewhere.values(), self._reads, listener.functions())

    def _left(self, found: Attributes, known: Ran | None, given: object, watch: OperatorWatch, listener: Listener) -> Left:
        """What the call has left in attributes and containers, where it had `found` this. It has `given` that away."""
        terms, reach = self._request.terms, self._request.reach
        # What is lent may not stay there; an operator's own code may do so in each replay by itself, and other threads always.
        if known is None or not alone() or terms.placement.borrow or watch.runs_python:
            return Left()
        traced = terms.tracing is not None
        # Whether it is another tensor of the call's, nobody could say of what stands in for one.
        asks = reach.mentions.asks_identity if traced else reach.mentions.keyed_by_identity or known.asks_identity
        carried = Carried(learns=False) if asks else terms.carried
        # Whoever asks where a tensor comes from may look at one that no operator reads.
        handed_on = _memory_in(given) if not reach.mentions.asks_history else None
        return left_by(found, known, carried, watch.touched, handed_on, listener.appended, reach.called, traced)

    def _restored(self, left: Left, listener: Listener) -> set[int]:
        """Put back what was in the places of carried state. Returns the identities of the containers that the call fills.

        Raises:
            Refusal: it has changed others.
        """
        filled = {identity(put.of) for put in left.items if not put.bound}
        for refusals in (calls for key, calls in listener.changed.items() if key not in filled):
            raise refusals[0]
        self._stand_ins.close()
        return filled

    def _own_memory(self, left: Left) -> None:
        """Refuse a view with a history of a tensor outside that is left somewhere: a replay could give it none."""
        outside = {storage_id(t): (name, t) for name, t in self._request.reach.tensors.values() if t._base is None}
        for put in left.puts:
            for t in tensors_in(put.new):
                name, of = outside.get(storage_id(t), ("", t)) if has_memory(t) else ("", t)
                if name and t is not of and t.grad_fn is not None and t._base is of:
                    raise Refusal(f"keeps a view of {name} in {put.path}, with a history", "keep a clone of it, as in "
                                  "weight.expand_as(x).clone()", final=False)  # fmt: skip

    def _made_by_call(self, left: Left, filled: set[int]) -> None:
        """Refuse a container that is left somewhere, and was there before, elsewhere."""
        for put in left.puts:
            if any(key in self._outer and key not in filled for key in map(identity, containers(put.new))):
                raise Refusal(f"keeps a container in {put.path} that is found elsewhere as well", "use a new one")

    def _returned(self, result: object, effects: _Effects, built: list[object]) -> Returned:
        grads = self._prepared.grads
        made_grads = {identity(g) for g in grads.read() if g is not None and not is_ordinary(g)}
        return Returned.of(result, effects.edits, effects.gained, effects.turned, built, self._outer | made_grads,
                           effects.filled, self._unread)  # fmt: skip

    def _check(self, arguments: Arguments, modes_before: object, listener: Listener) -> None:
        """Refuse what the call has done to modes and arguments; take it back if its code was not all looked at."""
        self._dials.ran(listener.ran)
        overlooked = listener.overlooked or self._request.reach.overlooked(listener.ran)
        if overlooked is not None:
            raise overlooked
        if modes() != modes_before:
            raise Refusal("changes a mode or setting of the process for good", "use it as a context manager (with ...)")
        arguments.check()

    def _leaving(self, result: object) -> list[torch.Tensor]:
        """The tensors of a result whose memory the program has to leave alone: no gradients, which stay in their place."""
        staying = {key for g in self._prepared.grads.read() if g is not None for key in storages(g)}
        tensors = _tensors_in(_leaves_of(result))
        return [t for t in tensors if _is_plain(t) and storage_id(t) not in staying]


def _none_read(texts: Sequence[_Text], ran: Ran | None) -> None:
    """Whether the call has read none of these.

    Raises:
        Fixed: it may have read some.
    """
    reads = ran.reads if ran is not None else None
    names = [(text, reads.names(text.of) if reads is not None else None) for text in texts]
    read = [text.place for text, found in names if found is None or text.name in found]
    if read:
        raise Fixed(texts=read)


def _may_change_gradients(ran: Iterable[CodeType], reach: Reach) -> bool:
    """Whether a call may have given parameters other gradients, going by the code that ran."""
    asks = reach.looks_at_gradients or reach.mentions.reads_gradients or reach.mentions.looks_around
    return asks or any(c.co_name == BACKWARD or "grad" in c.co_names or not _SETTERS.isdisjoint(c.co_names) for c in ran)


def _outside(call: Call, reach: Reach) -> dict[int, list[torch.Tensor]]:
    """The tensors that were there before the call, and which no slot stands for, by storage."""
    found: dict[int, list[torch.Tensor]] = defaultdict(list)
    for t in (*(t for _, t in reach.tensors.values()), *(t for t in call.tensors if isinstance(t, torch.nn.Parameter))):
        found[storage_id(t)].append(t)
    return found


def _with_slots(result: Leaves, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[object]:
    """The leaves of a result, with the slots themselves where it has what stood for them."""
    leaves: Leaves = []
    shape = flatten(result, leaves)
    own = {identity(t): slot for t, slot in pairs if t is not slot}
    if own.keys().isdisjoint(map(identity, leaves)):
        return result
    rebuilt: Leaves = unflatten(shape, iter([own.get(identity(leaf), leaf) for leaf in leaves]))
    return rebuilt


def _leaves_of(tree: object) -> list[object]:
    leaves: list[object] = []
    flatten(tree, leaves)
    return leaves


def _memory_in(tree: object) -> set[int] | None:
    """The storages of the tensors in what a call hands on, and the identities of the containers; None if there may be any."""
    flattener, leaves = Flattener(), list[object]()
    try:
        flattener.flatten(tree, leaves)
    except RecursionError:
        return None
    storages = {storage_id(t) for t in leaves if isinstance(t, torch.Tensor) and has_memory(t)}
    return storages | {*map(identity, flattener.containers)}


def _tensors_in(leaves: Leaves) -> list[torch.Tensor]:
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def _is_plain(t: torch.Tensor) -> bool:
    return type(t) in (torch.Tensor, torch.nn.Parameter) and has_memory(t)
