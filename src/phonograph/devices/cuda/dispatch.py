"""Watching a call while it is captured as CUDA graphs.

A capture writes down what is launched, with the addresses and numbers that it is launched with. Whatever else the call does
happens now, once, and would not happen again at a replay. So this watch refuses, besides what no device can record:

* copies from the device to the host. A tensor on the host is a constant of the recording: one that the call makes there of
  Python values, and draws nothing for; and one that is there outside, whose contents are compared before each replay. Nothing
  may write to the latter, and what is copied from the host comes from memory of the recording's own (`host_constants`);
* random numbers that are drawn on the host;
* a random generator that is met only when the capture has begun, because a graph has to know of it before. That refusal is
  not final: now it is known, and the next capture begins with it;
* work on a stream that does not wait for the capture's, which is no part of it and would run now;
* events of the user's own, on which work outside may wait, and whatever asks or waits for the device's progress.

Operators of linear algebra that look at a status on the host, only in order to raise, are captured without that look. Where
torch validates by them, a later call tells. Else a run looks at the status when it has ended, and is taken back if it is bad
(`statuses.py`).

Not every kernel comes from an operator. Inductor's code and Triton launch theirs by themselves; so the watch hears of the
Python functions that do (`frames`), and asks what they write. A tensor that they have made is new to it. Whether it is really
the call's own shows at the end, when the footprint is known: by its address.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FrameType
from typing import Any

import torch

from ..._torch import autograd as torch_autograd
from ..._torch import cuda as torch_cuda
from ..._torch import dynamo as torch_dynamo
from ..._torch import modes as torch_modes
from ..._torch import process_groups as torch_process_groups
from ..._torch.cuda import raw_stream
from ..._torch.dynamic import Args, Kwargs, Leaves
from ..._torch.tensors import has_memory, storage_id
from ...aten.collectives import COLLECTIVES, REMEDY, called, refusal
from ...aten.operators import (
    MASKED,
    Meaning,
    answers_by_shapes,
    brings_to_host,
    made_integers,
    meaning,
    operands,
    read_on_host,
)  # fmt: skip
from ...capture.breaks import Break
from ...capture.call_memory import MOVED
from ...capture.effects import ANYONE, Effect, Starts
from ...capture.exports import warps_stream
from ...capture.notes import Note
from ...capture.recipes import Recipes, bytes_of
from ...capture.recording import memory_of
from ...capture.value_checks import Check, validates
from ...distributed import agreement, nccl
from ...errors import Refusal, Unseen
from ...guards.objects import LARGE
from ...guards.reachable import Reach
from ...memory.pool import TensorAddress
from ...memory.spans import Spans
from ...python import memory_contents
from ...python.holders import Holder
from ...python.identity import identity
from ...python.origin import is_compiled, is_torchs, users_line
from ...state.rng import Rewind
from ...values.wording import MARKED, operator, source_of
from ..cuts import UNDONE
from . import driver
from . import rnn_dropout as cuda_dropout
from .bodies import Bodies
from .fixed_values import Versions, Watched
from .host_constants import Room, given, moves
from .places import Notebook
from .random_states import DrawsWatch
from .statuses import CONSISTING, LOOKS, TOLD, check_of, indices_of, looks, stops_by_values
from .value_checks import Answers

__all__ = ["CudaWatch"]

_LAUNCH_HERE = f"launch it on torch.cuda.current_stream(), {MARKED}"
_HANDED_OUT = meaning(torch.ops.aten.alias.default)._replace(name="data_ptr")
_SEEDED, _SEEDS = "aten::_efficient_attention_forward", slice(2, 4)  # its results that lie on the CPU, but for in a capture
_NEGATIVE = "normal expects all elements of std >= 0.0"
# To find eigenvalues, cuSOLVER waits for the GPU, which no capture allows. Its handle keeps that failure: the next call of such
# an operator on this thread raises CUSOLVER_STATUS_EXECUTION_FAILED or INTERNAL_ERROR, and only the one after it works (torch
# 2.11, CUDA 13.0, H200; so does the SVD by QR iterations. No other library's handle, nor another operator, was seen to).
_EIGENVALUES = {f"aten::{name}" for name in ("_linalg_eigh", "linalg_eigh", "linalg_eigvalsh", "linalg_eig", "linalg_eigvals",
                                             "_linalg_eigvals")}  # fmt: skip
_IF_HERMITIAN = {"aten::linalg_pinv", "aten::linalg_matrix_rank"}  # by way of those
_IF_BY_QR = {"aten::linalg_svd", "aten::_linalg_svd", "aten::linalg_svdvals"}
_HEARD = Effect("", by=ANYONE)  # of starts that are only heard of
_RECORDS = Effect(
    "records an event that was there before the call", "make the event in the function: torch.cuda.Event()", ANYONE
)
_BESIDE = Effect("lets a stream wait for work that is not the call's", "let it wait before the call", ANYONE)
_ASKS = Effect("asks how far the GPU is (query)", by=ANYONE)
_WAITS = Effect("waits for the GPU (synchronize)", by=ANYONE)
_UNSAID = Effect("calls code of Inductor's that does not say which of its inputs it writes", "record it uncompiled", ANYONE)


_PAIRWISE = frozenset({"send", "recv"})
_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")
# Who has begun a group in NCCL cannot take it back: a capture that is given up there leaves something of it to later calls.
_IN_A_GROUP = Effect(refusal("_coalescing_manager").reason, REMEDY, ANYONE)


def _begins_group(frame: FrameType) -> bool:
    """Whether a group begins there and then in which code of anybody's may run; without a device, collectives are collected
    first."""
    return frame.f_locals.get("device") is not None and torch_process_groups.batch_of(frame) is None


class CudaWatch(DrawsWatch):
    """Watches one call. Its `cuts` are the live operators at which a graph ended and the next began, with what each reads and
    gives."""

    reads_counts = True

    def __init__(
        self, device: torch.device, reach: Reach, slots: list[torch.Tensor], borrowed: Sequence[bool],
        generators: list[torch.Generator], lent: list[torch.Generator], free: Spans, rewind: Rewind | None, stream: int,
    ) -> None:  # fmt: skip
        super().__init__(device, reach, slots, borrowed, generators, lent, rewind)
        self._thread = threading.get_ident()
        self._performing = 0  # operators that run within each other
        self.notebook: Notebook | None = None  # of what each operator touches, if somebody wants to know
        self._free = free  # what was free in the pool before: a tensor that lies there is the call's own
        self._stream = stream
        self.streams: dict[int, torch.cuda.Stream] = {}  # others on which something was captured
        self._events: list[object] = []  # which the call has made
        self.room: Room | None = None  # for constants of the host's
        self._hosts: list[torch.Tensor] = []  # those that the operator is given which is about to run
        self._lines: dict[int, tuple[CodeType, str]] = {}  # code by its identity, and the user's line that calls it
        self.next_segment: Callable[[], None] = _nothing
        self.bodies_here: Callable[[], Bodies] | None = None  # of the graph that is captured
        self._spoke: tuple[Bodies, int] | None = None  # where it has communicated last, and how many bodies there were
        self.captured: Callable[[], int] = int
        self.launches: Callable[[list[range]], list[tuple[str, object]]] = _none_of
        self.words: Callable[[list[range]], Set[int]] = _no_words
        # Addresses that others have been given, after how many nodes, and the user's lines.
        self._handed_out: list[tuple[range, int, str]] = []
        self._kernels: list[tuple[str, object]] = []  # of earlier segments, launched without an operator
        self.answers: Answers | None = None  # of checks, where each run keeps them
        self.cuts: list[tuple[Break, list[TensorAddress], list[TensorAddress]]] = []
        self._buffer: torch.Tensor | None = None  # from which dropout of cuDNN's was drawn
        self.begins_dropout = False  # that was about to be made anew
        self.collectives: dict[str, int] = {}  # by the user's lines: how many
        self.groups: dict[str, None] = {}  # process groups by their names
        self._answered: list[torch.Tensor] = []  # those on the device that the operator reads which is about to run
        self._status: Refusal | None = None  # of the first operator at whose status each run looks when it has ended
        self._since = 0  # how many storages the call had made by then
        self.elsewhere: set[int] = set()  # storages of results that lie on another device where nothing is captured

    def runs_beside(self, beside: Callable[[], AbstractContextManager[object]]) -> None:
        """What is worked out at once runs there."""
        self._recipes = Recipes(self.device, beside)

    @property
    def dropout(self) -> cuda_dropout.Dropout | None:
        """What has to be done for the dropout of cuDNN's."""
        return None if self._buffer is None else cuda_dropout.Dropout(self._buffer, copied=not self.cuts)

    def _see(self, m: Meaning, args: Args, kwargs: Kwargs, note: Note) -> None:
        if m.random and cuda_dropout.begins_anew(m.name, args, sys._getframe(1)):
            self.begins_dropout = True
            raise Unseen(f"{source_of(m.name)} draws a seed for {cuda_dropout.BUFFER}",
                         "seed outside, and not before each call", final=False)  # fmt: skip
        if (buffer := cuda_dropout.buffer_of(m.name, args)) is not None:
            self._see_buffer(m, args, buffer)
        super()._see(m, args, kwargs, note)
        if raw_stream(self.device.index) != self._stream and not m.metadata_only:
            self._look_at_stream()
        self._hosts = [t for t in note.tensors if t.is_cpu]
        if self._hosts or m.copies:
            self._see_hosts(m, args, kwargs, len(self._hosts) < len(note.tensors))

    def _see_buffer(self, m: Meaning, args: Args, buffer: torch.Tensor) -> None:
        """Dropout of cuDNN's is drawn from memory that nothing leads to."""
        key = storage_id(buffer)
        self.known[key] = cuda_dropout.BUFFER
        self.outside.add(key)
        self.theirs.add(key)
        self.met_outside(buffer)
        self.untraced.pop(memory_of(buffer), None)  # autograd has saved it before
        if cuda_dropout.draws(m.name, args):
            self._buffer, self.drops_out = buffer, True
            if self.sets_states:  # in a capture, torch does not take note of that
                raise self.located(Refusal(f"{source_of(m.name)} draws a seed for {cuda_dropout.BUFFER}, because the call has "
                                           "set the state of the random generator (recompute does, too)",
                                           "put nn.Dropout between layers of their own, instead of dropout="))  # fmt: skip
            self.more = self.more or "draws random numbers"
            self.writes(buffer)

    def only_views(self, m: Meaning, args: Args) -> bool:
        """Recurrent networks of cuDNN's take their weights as one tensor: a new one that is set to the weights' memory."""
        if m.name != "aten::set_" or len(args) < 2 or not isinstance(args[1], torch.UntypedStorage):
            return False
        t = args[0]
        own = self.known.get(storage_id(t)) == "" and not t.untyped_storage().nbytes()
        return own and args[1]._cdata in self.known

    def _see_hosts(self, m: Meaning, args: Args, kwargs: Kwargs, others: bool) -> None:
        """Refuse a copy to the host, and note which tensors of the host that are there outside are read. Whether there are
        `others` among the arguments."""
        if m.copies and others:
            target = kwargs.get("device")
            to_host = (target is not None and torch.device(target).type == "cpu") or (
                m.name == "aten::copy_" and args[0].device.type == "cpu"
            )
            if to_host and m.name == "aten::_to_copy" and self.reads_fixed(m.name, [args[0]], sys._getframe(1)):
                self._answered = [args[0]]
            elif to_host:
                raise brings_to_host(m.name)
        for t in self._hosts:
            self.reads_on_host(t, source_of(m.name))
        if self._hosts and not others:
            self.dials_lost([*args, *kwargs.values()])  # what is worked out here is not launched

    def reads_on_host(self, t: torch.Tensor, said: str) -> None:
        """Its contents are what a recording relies on, if it is a tensor of the host that is there outside."""
        key = storage_id(t)
        name = self.known.get(key) if t.is_cpu else ""
        if not name or key in self.relied_on:
            return
        there = [x for x in self._outside if storage_id(x) == key]
        if any(x.requires_grad for x in there) and torch.is_grad_enabled():
            raise Refusal(f"{said} uses {name}, a tensor on the CPU that requires a gradient", "move it to the device")
        if t.untyped_storage().nbytes() > LARGE:
            raise Refusal(f"{said} uses {name}, a tensor on the CPU of more than {LARGE >> 20} MiB, which nobody could compare "
                          "before each replay", "move it to the device")  # fmt: skip
        self.touched.add(key)
        self.relied_on[key] = place = memory_contents.memory(name, t.untyped_storage(), there)
        self.relies([place])

    def writes(self, t: torch.Tensor, version: int | None = None) -> None:
        name = self.known.get(storage_id(t)) if t.is_cpu else ""
        if name:
            raise self.located(Refusal(f"writes {name}, a tensor on the CPU, which a replay could not repeat",
                                       "move it to the device, or write it outside"))  # fmt: skip
        super().writes(t, version)

    def is_constant(self, m: Meaning, args: Args, kwargs: Kwargs) -> bool:
        """An operator may read what lies on the host, and is the same in each replay; so may an index that is a mask; and what
        holds the same on the device, which it is told."""
        if answers_by_shapes(m, args):
            return True
        if super().is_constant(m, args, kwargs):
            self._answered = [t for t in read_on_host(m, args, kwargs) if not t.is_cpu]
            return True
        if not (m.reads_host or m.shape_from_data or m.name in MASKED):
            return False
        tensors = operands(args, kwargs)
        if m.name in MASKED and tensors and not tensors[0].is_cpu:
            tensors = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        elif torch.device(kwargs.get("device") or "cpu").type != "cpu":
            return False
        known = [self.known.get(storage_id(t)) is not None for t in tensors if t.is_cpu and has_memory(t)]
        return len(known) == len(tensors) > 0 and all(known)

    def communicates(self, m: Meaning, args: Args, kwargs: Kwargs) -> None:
        self._ends_without(f"communicates with other ranks ({called(m.name)})")
        known = COLLECTIVES.get(m.name)
        if known is None or known.host:
            raise refusal(m.name, known.host if known is not None else "")
        self._is_here(m.name, operands(args, kwargs))
        if known.name != "wait_tensor":
            self._may_communicate(m.name, [*args, *kwargs.values()])
            self._goes_on(m.name)
            said = f"{called(m.name)} at {users_line(sys._getframe(1))}"
            self.collectives[said] = self.collectives.get(said, 0) + 1
        self.communicated = True
        self.more = self.more or f"communicates with other ranks ({known.name})"

    def _goes_on(self, name: str) -> None:
        """Refuse what NCCL takes for the same capture as before a branch or loop, where its own streams have left that."""
        bodies = self._conditionals
        number = len(bodies.graphs)
        if self._spoke is not None and self._spoke[0] is bodies and self._spoke[1] != number:
            raise refusal(name, " before and after a branch or loop by what a tensor holds", "do it on one side of that")
        self._spoke = bodies, number

    def _is_here(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        if any(t.device != self.device for t in tensors):
            raise refusal(name, f" with tensors that are not on {self.device}")

    def _may_communicate(self, name: str, given: list[object]) -> None:
        """Refuse an operator of this name that is given a process group whose work is none for a graph, or not yet."""
        self._see_group(name, given)
        if called(name) in _PAIRWISE and not self.warm:  # what two ranks alone share, begins with the first message
            raise Unseen(f"communicates with other ranks ({called(name)}) for the first time", "call it once before",
                         final=False)  # fmt: skip

    def begins_group(self, frame: FrameType) -> bool:
        """Sends and receives in a batch: none of them may be refused when the group has begun, in which nobody else's code
        runs. So all are looked at now."""
        batch, group, device = torch_process_groups.batch_of(frame), frame.f_locals.get("group"), frame.f_locals.get("device")
        if batch is None or not isinstance(device, torch.device):
            return False
        sends = meaning(torch.ops.c10d.send.default)
        for message in batch:
            self._see(sends, ([message.tensor],), {}, Note(([message.tensor],), {}, self.known))
            self._is_here(sends.name, [message.tensor])
        self._may_communicate(sends.name, [group])
        self._groups[identity(group)] = device
        return True

    def _see_group(self, name: str, given: Leaves) -> None:
        """Refuse a process group whose work is none for a graph."""
        group = torch_process_groups.group_among(given)
        backend = torch_process_groups.backend_of(group, self.device)
        if backend is None or not torch_process_groups.groups_tell_their_end():
            raise refusal(name, ", of which this release of torch tells too little")
        if backend.name() != "nccl":
            raise refusal(name, f" by way of {backend.name()}")
        if not torch_process_groups.has_begun(backend):  # the live call that follows begins it
            raise Unseen(f"communicates with other ranks ({called(name)}) for the first time", "call it once before",
                         final=False)  # fmt: skip
        if not self.communicated:
            nccl.register_nothing(os.environ)
            version = torch.cuda.nccl.version()
            far = version < nccl.ACROSS_HOSTS and nccl.several_hosts()
            expand = os.environ.get(nccl.REGISTERS) != "0" and torch_cuda.segments_expand()  # which takes long to look at
            others = agreement.unlike(agreement.own(version))
            for one in nccl.obstacles(os.environ, version, expand, far):
                raise refusal(name, f" with {one.name}={one.value}, {one.why}", one.remedy)
            if others:
                raise refusal(name, f" that are not alike: {others}", "install and set the same on all ranks")
        self.groups[group.group_name] = None

    def _look_at_stream(self) -> None:
        """What is launched now goes to the current stream, which may be another than that of the capture."""
        stream = raw_stream(self.device.index)
        if stream != self._stream and self._conditionals.graphs:
            raise self.located(Refusal("works on another stream than that of the call, in or after a branch or loop by what a "
                                       "tensor holds", "do it before"))  # fmt: skip
        if stream == self._stream or stream in self.streams:
            return
        if not driver.is_capturing(stream):
            raise self.located(Refusal("works on a stream that does not wait for that of the call",
                                       "stream.wait_stream(torch.cuda.current_stream())"))  # fmt: skip
        self.streams[stream] = torch.cuda.current_stream(self.device)

    def frames(self) -> Starts:
        path, called = torch_dynamo.COMPILED_GRAPH
        streams = os.path.join("torch", "cuda", "streams.py")
        return {
            **super().frames(),
            called: [(path, self._compiled, _UNSAID)],
            "run": [(os.path.join("triton", "runtime", "jit.py"), self._launched, _HEARD)],
            "record": [(streams, self._is_beside, _BESIDE), (streams, self._is_others, _RECORDS)],
            "wait": [(streams, self._waits_for_others, _BESIDE)],
            "query": [(streams, _always, _ASKS)],
            "_coalescing_manager": [(_C10D, _begins_group, _IN_A_GROUP)],
            "synchronize": [(streams, _always, _WAITS), (os.path.join("torch", "cuda", "__init__.py"), _always, _WAITS)],
        }

    def _is_beside(self, frame: FrameType) -> bool:
        """Whether an event is recorded on a stream that does not wait for the call's."""
        stream = frame.f_locals.get("stream") or torch.cuda.current_stream(self.device)
        return not driver.is_capturing(stream.cuda_stream)

    def _waits_for_others(self, frame: FrameType) -> bool:
        """Whether a stream waits for an event that is not the call's. One that waits for such belongs to the capture."""
        stream = frame.f_locals.get("stream") or torch.cuda.current_stream(self.device)
        if not any(frame.f_locals.get("self") is own for own in self._events):
            return True
        if stream.cuda_stream != self._stream:
            self.streams[stream.cuda_stream] = stream
        return False

    def _is_others(self, frame: FrameType) -> bool:
        """Whether an event is recorded that was there before the call."""
        event = frame.f_locals.get("self")
        if event is None or any(event is own for own in self._events):
            return False
        if event.cuda_event:  # it has been recorded before
            return True
        self._events.append(event)
        return False

    def _compiled(self, frame: FrameType) -> bool:
        """Whether Inductor's code for a graph is called, whose kernels are no operators, and it does not say what it writes."""
        self._ends_without("calls compiled code")
        self._look_at_stream()
        if self.digest is not None:
            self.digest.note_graph(frame.f_locals["self"])
        for t in frame.f_locals.get("inputs") or ():
            if isinstance(t, torch.Tensor) and has_memory(t):
                self.reads_on_host(t, "compiled code")
        written = torch_dynamo.written_by_graph(frame)
        for t in written or ():
            self.writes(t, MOVED)
        if self.arrivals is not None:
            self.arrivals.lose(written or ())
        return written is None

    def _launched(self, frame: FrameType) -> bool:
        """Never: somebody launches a Triton kernel. What it writes it does not say, unless it belongs to an operator."""
        if not self._performing:
            self._ends_without("launches a kernel")
            self._look_at_stream()
            given = [*frame.f_locals.get("args", ()), *frame.f_locals.get("kwargs", {}).values()]
            tensors = [t for t in given if isinstance(t, torch.Tensor) and has_memory(t)]
            for t in tensors:
                self.writes(t)
            if self.arrivals is not None:
                self.arrivals.lose(tensors)
        return False

    def takes(self, check: Check) -> bool:
        """Its exception comes late, when what follows the check is done: an update that it was to prevent, say."""
        return check.validates

    def checks(self, check: Check, answer: torch.Tensor) -> bool:
        assert self.answers is not None
        if self.bodies:  # it has no answer where the body is not taken
            raise self.located(Refusal("checks values in a branch or loop", "check them before, or pass "
                                       "validate_args=False to distributions"))  # fmt: skip
        self._look_at_stream()
        self.answers.add(check, answer)
        return super().checks(check, answer)

    def perform(self, func: Any, m: Meaning, args: Args, kwargs: Kwargs, note: Note | None = None) -> object:
        if _spoils_handle(m.name, args, kwargs):
            raise Refusal(f"{source_of(m.name)} waits for the GPU", f"do that outside the recorded function, {MARKED}")
        if self._status is not None:
            self._goes_on_after(m, args, kwargs)
        if m.random:
            self.draws(m, args, kwargs)
        if looks(m.name, kwargs) and args[0].is_cuda:
            return self._without_look(func, m, args, kwargs)
        if m.name == "aten::normal" and _has_many_deviations(args) and validates(sys._getframe(1), self.outermost):
            with torch_modes.without_modes():
                lowest = args[1].detach().amin() >= 0
            self.checks(Check(True, RuntimeError, _NEGATIVE, users_line()), lowest)
            func = _normal
        hosts, self._hosts = self._hosts, []
        told, self._answered = self._answered, []
        if told:
            if m.name not in MASKED:
                return self._worked_out(func, args, kwargs)
            args = (args[0], [self.value(i) if any(i is t for t in told) else i for i in args[1]], *args[2:])
            hosts = hosts or told
        if moves(m) and not self.states.knows(args[0]):
            with self:
                return func.decompose(*args, **kwargs)
        if m.others and hosts and all(t.is_cpu for t in operands(args, kwargs)):
            raise Refusal(f"{source_of(m.name)}, an operator of others, works on the CPU", "give it tensors of the device")
        if hosts and self.room is not None:
            func, args, kwargs = given(self.room, func, m, args, kwargs)
        self.numbered_apart = self.numbered_apart or (torch.is_grad_enabled() and _differentiates_apart(self._thread))
        self._performing += 1
        begun = self.notebook.begin() if self.notebook is not None else None
        try:
            out: Any = super().perform(func, m, args, kwargs)
        finally:
            self._performing -= 1
        if self.notebook is not None and begun is not None:
            self.notebook.end(func, args, kwargs, out, begun)
        if m.name == _SEEDED:
            self.elsewhere |= {storage_id(t) for t in out[_SEEDS]}
        if m.name == "aten::to" and self.states.knows(args[0]) and out is not args[0]:
            super().refuse_untraced(m, args[0])
        if self._status is not None and m.converts and made_integers(args, out):
            self._ends_without(f"makes integers of floating-point numbers ({source_of(m.name)})")
        return out

    # -- operators that look at a status in order to raise

    def _without_look(self, func: Any, m: Meaning, args: Args, kwargs: Kwargs) -> object:
        """What an operator gives that `looks` at a status."""
        if m.name in CONSISTING:
            with self:
                return func.decompose(*args, **kwargs)
        if m.name == LOOKS:
            self._looks(func, m, args[1], args[0])
            return None
        found: Any = self.perform(func, m, args, {**kwargs, TOLD: False})
        self._looks(func, m, m.name.removeprefix("aten::"), found[-1])
        return found

    def _looks(self, func: Any, m: Meaning, name: str, status: torch.Tensor) -> None:
        """An operator of this name would look at this status. A run does that for it: when it has ended, or later."""
        with torch_modes.without_modes():
            failed = (status != 0).any()
        check = check_of(name, users_line())
        if not validates(sys._getframe(1), self.outermost):
            refusal = Refusal(f"{source_of(m.name)} looks at a status on the host, in order to raise",
                              "use the form that returns it (torch.linalg.cholesky_ex), and torch.where; or "
                              'fallback="split"', check.where, operator=func)  # fmt: skip
            cut = self.split or self.decisive or self.parts or self.cuts
            if cut or self.bodies or self.communicated or not self.may_begin_again or self.caught(any_kind=False):
                raise refusal
            if self._status is None:
                self._status, self._since = refusal, self._made
            check.awaited = True
        self.checks(check, failed)

    def _goes_on_after(self, m: Meaning, args: Args, kwargs: Kwargs) -> None:
        """Refuse an operator that may stop the GPU where what it is given has been made since, of what no live call has."""
        made = [self.name_of(storage_id(t)) for t in indices_of(m.name, args, kwargs) if self.fixed(t) is None]
        since = any(isinstance(number, int) and number >= self._since for number in made)
        if since or m.others or stops_by_values(m.name, args):
            self._ends_without(f"calls {source_of(m.name)}")

    def _ends_without(self, does: str) -> None:
        """The call does this. A run that goes on after a bad status must not: it could not be taken back, or might not end."""
        if self._status is not None:
            raise self.located(Refusal(f"{does} after it has looked at a status in order to raise (at {self._status.where})",
                                       "do it before that, or outside"))  # fmt: skip

    def can_be_taken_back(self, left: Sequence[weakref.ref[torch.UntypedStorage]]) -> None:
        """
        Raises:
            Refusal: the call writes more outside, or leaves more there, than each run could note before it begins.
        """
        assert self._status is not None
        there = [*self.changed(), *(storage for ref in left if (storage := ref()) is not None)]
        refusal, self._status = self._status, None  # which its traceback would keep
        if sum(storage.nbytes() for storage in there) > UNDONE:
            raise refusal

    def hands_out(self, owner: torch.Tensor | torch.UntypedStorage) -> None:
        """A kernel may get this address, of which no operator tells. It may write there."""
        if owner.device != self.device:
            return super().hands_out(owner)
        self._ends_without("hands out the address of a tensor")
        self._look_at_stream()
        with torch_modes.without_modes():
            storage = owner if isinstance(owner, torch.UntypedStorage) else owner.untyped_storage()
            t = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        if self.known.get(storage._cdata):
            self.touched.add(storage._cdata)
        elif storage._cdata not in self.known:
            self.refuse_untraced(_HANDED_OUT, t)
        self.writes(t)
        if self.arrivals is not None:
            self.arrivals.lose([t])
        if storage.nbytes():
            memory = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            self._handed_out.append((memory, self.captured(), users_line()))
        return None

    def all_launched_here(self) -> None:
        """Refuse an address that nothing has been given which was captured since, without an operator."""
        handed_out, self._handed_out = self._handed_out, []
        places = self.origins.unnamed(self.captured()) if handed_out else []
        for memory, begin, line in handed_out:
            given = self.words([range(max(place.start, begin), place.stop) for place in places])
            if not any(word in memory for word in given):
                raise self.located(Refusal("hands the address of a tensor to code outside torch, which launches nothing on the "
                                           "stream of the call", _LAUNCH_HERE, line))  # fmt: skip

    def runs_elsewhere(self, frame: FrameType) -> bool:
        stream = warps_stream(frame)
        return stream is None or not driver.is_capturing(stream)

    # -- what holds the same in each replay

    def read_as_fixed(self, t: object, frame: FrameType, shown: bool) -> torch.Tensor | None:
        on_host = isinstance(t, torch.Tensor) and t.is_cpu  # which is read itself
        return None if on_host else super().read_as_fixed(t, frame, shown)

    def value(self, t: torch.Tensor) -> torch.Tensor:
        assert self._recipes is not None
        return self._recipes.value(t, self.known_as)

    def held(self, name: str, tensors: Sequence[torch.Tensor], where: str) -> Holder:
        if tensors[0].is_cpu:
            return super().held(name, tensors, where)
        assert self.room is not None
        assert self.answers is not None
        here = bytes_of(tensors[0])
        before = self.value(here)
        watched = Watched(name, where)
        with torch_modes.without_modes(), torch.inference_mode(False), torch.no_grad():
            self.answers.add(watched, (here == self.room.place(before)).all())
        place, t = Versions(watched, tensors, before).place(name), self._count_at(storage_id(tensors[0]))
        return place if t is None else self.followed_later(place, name, t)

    def _worked_out(self, func: Any, args: Args, kwargs: Kwargs) -> object:
        """What an operator gives that would read on the host what holds the same in each replay, or copy it there."""
        assert self._recipes is not None
        found = self._recipes.result(func, args, kwargs, self.known_as)
        if meaning(func).copies:
            self._begins(found.untyped_storage())
            return found
        return self._placed(found)

    def _placed(self, found: Any) -> Any:
        if isinstance(found, (list, tuple)):
            return type(found)(map(self._placed, found))
        if not isinstance(found, torch.Tensor):
            return found
        assert self.room is not None
        clone = torch.ops.aten.clone.default
        return super().perform(clone, meaning(clone), (self.room.place(found),), {})

    def cut(self, part: Break, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        self._ends_without("runs something live")
        self.may_cut(part)
        self.all_launched_here()
        self.cuts.append((part, [*map(TensorAddress.of, inputs)], [*map(TensorAddress.of, results)]))
        self._kernels = self.kernels()
        self.next_segment()

    def kernels(self) -> list[tuple[str, object]]:
        return [*self._kernels, *self.launches(self.origins.unnamed(self.captured()))]

    def _constant(self, t: torch.Tensor) -> torch.Tensor:
        if self.dials and self.dials.stands_in(t):
            self.dials.lost = True  # its value would be that of what stands in for a number
        return super()._constant(t)

    def refuse_untraced(self, m: Meaning, t: torch.Tensor) -> None:
        # A compiled part makes tensors that no operator was seen to make; whether this is one shows at the end, by its
        # address. Host constants need no watching: they are baked in.
        if t.is_cuda:
            place = (t.untyped_storage().data_ptr(), t.untyped_storage().nbytes())
            if place not in self.untraced and not self._free.covers(*place):
                self.untraced[place] = (f"`{operator(m.name)}`", self._line())
        elif m.name != "aten::to" or not self.states.knows(t):
            super().refuse_untraced(m, t)

    def _line(self) -> str:
        """The user's line, which takes a while to find. Inductor's code for a graph works with hundreds of tensors that it has
        made itself: it is looked for once for all of them."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and is_torchs(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None or not is_compiled(frame.f_code.co_filename):
            return users_line(frame)
        code = identity(frame.f_code)  # a code's hash goes through all its instructions
        if code not in self._lines:
            self._lines[code] = frame.f_code, users_line(frame)
        return self._lines[code][1]

    # -- branches and loops

    @property
    def _conditionals(self) -> Bodies:
        assert self.bodies_here is not None
        return self.bodies_here()

    def capture_branch(self, index: torch.Tensor, bodies: Sequence[Callable[[], None]]) -> None:
        self._ends_without("branches by what a tensor holds")
        with self._refusing():
            self._conditionals.choose(index, bodies)

    def capture_loop(self, condition: Callable[[], torch.Tensor], body: Callable[[], None]) -> None:
        self._ends_without("loops by what a tensor holds")
        with self._refusing():
            self._conditionals.repeat(condition, body)

    def uneven(self) -> bool:
        return bool(self._conditionals.offset)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except Refusal as refusal:
            raise self.located(refusal) from None


def _differentiates_apart(thread: int) -> bool:
    """Whether a backward makes nodes here, on another thread than this one. (What a checkpoint recomputes, it drops.)"""
    return threading.get_ident() != thread and torch_autograd.backward_id() != -1 and torch_autograd.keeps_graph()


def _spoils_handle(name: str, args: Args, kwargs: Kwargs) -> bool:
    """Whether an operator has cuSOLVER do what its handle does not get over in a capture."""
    if name in _IF_HERMITIAN:
        does = bool(kwargs.get("hermitian")) or any(x is True for x in args)
    elif name in _IF_BY_QR:
        does = any(type(x) is str and x == "gesvd" for x in (*args, *kwargs.values()))
    else:
        does = name in _EIGENVALUES
    return does and any(t.is_cuda for t in operands(args, kwargs))


def _always(_: FrameType) -> bool:
    return True


def _no_words(places: list[range]) -> Set[int]:
    """Of a graph that is not there yet."""
    return frozenset()


def _none_of(places: list[range]) -> list[tuple[str, object]]:
    """Of a graph that is not there yet."""
    return []


def _nothing() -> None:
    """What comes before anything is captured."""


def _has_many_deviations(args: Args) -> bool:
    """Whether these arguments of `aten::normal` have a tensor of standard deviations, at the least of which it looks on the
    host."""
    return len(args) == 2 and isinstance(args[1], torch.Tensor) and args[1].numel() > 0 and not args[1].is_complex()


def _normal(mean: Any, std: torch.Tensor, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """The same as that, without the look."""
    many = isinstance(mean, torch.Tensor)
    size = torch.broadcast_shapes(mean.shape, std.shape) if many else std.shape
    out = torch.empty(size, dtype=(mean if many else std).dtype, device=std.device).normal_(generator=generator)
    return out.mul_(std).add_(mean if many else torch.full((), mean, dtype=out.dtype, device=out.device))
