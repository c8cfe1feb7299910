"""C12: whatever comes in the middle of a call (Ctrl-C, a lack of memory, a fork by another thread), nothing of ours stays in
the process, and what the call has changed is what was there before, or what eager leaves."""

import contextlib
import gc
import logging
import os
import sys
import threading
import warnings

import pytest
import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

import phonograph as pg
from phonograph.devices.cpu.tape import Tape
from phonograph.devices.cuts import Cuts
from phonograph.engine import current_capture, transaction
from phonograph.errors import NotPutBack
from phonograph.guards.snapshot import Snapshot
from phonograph.python import read_gate, standing
from phonograph.reads import gate, readset
from phonograph.slots.table import Table
from phonograph.state.reentrancy import Nested
from phonograph.testing import assert_same
from tests.helpers import as_ours, may_run_live, ramp

HOME = os.path.dirname(pg.__file__)
PATCHED = ("apply_", "map_", "numpy", "tensor_split", "tolist", "__bool__", "item", "__float__")


class Trainer:
    def __init__(self, device):
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)).to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.steps, self.losses = 0, []

    def step(self, x):
        self.steps += 1
        loss = self.net(x).pow(2).sum()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())
        return loss.detach()

    def state(self):
        kept = [v for p in self.net.parameters() for v in self.optimizer.state[p].values()]
        tensors = [*self.net.state_dict().values(), *kept, *(p.grad for p in self.net.parameters())]
        return [self.steps, len(self.losses), *(t if t is None else t.clone() for t in tensors)]


def house():
    """What is replaced in the process while a call is captured."""
    classes = (torch.Tensor, PATCHED), (torch.nn.Module, ["__getattribute__"]), (Trainer, ["__getattribute__", "__setattr__"])
    patched = {(kind.__name__, name): vars(kind).get(name) for kind, names in classes for name in names}
    patched["scaler"] = torch.amp.GradScaler._maybe_opt_step
    return patched | {
        "collector": (gc.isenabled(), [*gc.callbacks]), "nested": (Nested.running, Nested.waiting), "cuts": len(Cuts.now),
        "modes": _len_torch_dispatch_stack(), "captures": len(current_capture._captures),
        "gates": (read_gate._noting.locked(), len(gate._standing)), "standing": len(standing._all),
        "threads": torch._C._is_multithreading_enabled(),
    }  # fmt: skip


def raising_at(n, error):
    """What raises at the n-th start of a function of phonograph's, and counts them."""
    count = [0]

    def trace(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            count[0] += 1
            if count[0] == n:
                raise error("injected")

    return trace, count


def interrupted(device, calls, n, error):
    """What a step leaves in whose call after so many something raises; how many functions that call starts."""
    trainer = Trainer(device)
    recorded = pg.record(trainer.step, keep="always")
    for i in range(calls):
        trainer.optimizer.zero_grad()
        recorded(ramp(device, 4, 3).cos() + i)
    trainer.optimizer.zero_grad()
    before, (trace, count), raised = house(), raising_at(n, error), None
    sys.settrace(trace)
    try:
        recorded(ramp(device, 4, 3).cos() + calls)
    except error as e:
        raised = e
    finally:
        sys.settrace(None)
    assert house() == before, n
    return trainer.state(), raised, count[0]


def is_same(a, b):
    return all(x is y or (torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y)
               for x, y in zip(a, b, strict=True))  # fmt: skip


@may_run_live
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize(("calls", "stride"), [(1, 997), (4, 17)], ids=["capture", "replay"])
def test_c12_what_raises_in_any_function_of_ours(device, caplog, calls, stride, error):
    eager = Trainer(device)
    for i in range(calls):
        eager.optimizer.zero_grad()
        eager.step(ramp(device, 4, 3).cos() + i)
    eager.optimizer.zero_grad()
    before = eager.state()
    eager.step(ramp(device, 4, 3).cos() + calls)
    after, unlisted = eager.state(), [calls + 1, calls, *eager.state()[2:]]  # it lists its loss last
    caplog.set_level(logging.CRITICAL, "phonograph")
    _, _, count = interrupted(device, calls, 0, error)
    for n in range(1, count, stride):
        left, raised, _ = interrupted(device, calls, n, error)
        assert any(is_same(left, state) for state in ([after] if raised is None else [before, after, unlisted])), (n, raised)


@may_run_live
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_c12_what_raises_as_those_who_note_reads_are_left(device, caplog, monkeypatch, error):
    """A read of what leaves a `with` block is noted like any other: what leaves it may not even begin."""
    caplog.set_level(logging.CRITICAL, "phonograph")
    has_read, reads, at = readset.ReadSet.has_read, [0], [0]

    def raises(self, thing, name, frame):
        if isinstance(thing, contextlib.AbstractContextManager):
            reads[0] += 1
            if reads[0] == at[0]:
                raise error("injected")
        return has_read(self, thing, name, frame)

    monkeypatch.setattr(readset.ReadSet, "has_read", as_ours(raises, has_read))
    eager, states = Trainer(device), []
    for i in range(2):
        eager.optimizer.zero_grad()
        eager.step(ramp(device, 4, 3).cos() + i)
        eager.optimizer.zero_grad()
        states.append(eager.state())
    while reads[0] >= at[0] and at[0] < 60:
        at[0], reads[0], trainer, raised = at[0] + 1, 0, Trainer(device), None
        recorded = pg.record(trainer.step, keep="always")
        for i in range(2):
            trainer.optimizer.zero_grad()
            before, reads[0] = house(), 0
            try:
                recorded(ramp(device, 4, 3).cos() + i)
            except error as e:
                raised = e
            assert house() == before, at
        trainer.optimizer.zero_grad()
        assert is_same(trainer.state(), states[0 if raised is not None else 1]), (at, raised)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_c12_what_raises_while_a_first_play_leaves_what_it_has_made(device, caplog, monkeypatch, error):
    eager, leave_first = Trainer(device), Table.leave_first
    for i in range(2):
        eager.optimizer.zero_grad()
        eager.step(ramp(device, 4, 3).cos() + i)
    after, unlisted = eager.state(), [2, 1, *eager.state()[2:]]
    caplog.set_level(logging.CRITICAL, "phonograph")

    def left(n):
        trainer, (trace, count) = Trainer(device), raising_at(n, error)

        def traced(*args):
            sys.settrace(trace)
            try:
                leave_first(*args)
            finally:
                sys.settrace(None)

        monkeypatch.setattr(Table, "leave_first", traced)
        recorded = pg.record(trainer.step, keep="always")
        for i in range(2):
            trainer.optimizer.zero_grad()
            with contextlib.suppress(error):
                recorded(ramp(device, 4, 3).cos() + i)
        return trainer.state(), count[0]

    _, count = left(0)
    assert count > 5
    for n in range(1, count + 1, 1 + count // 40):
        assert any(is_same(left(n)[0], state) for state in (after, unlisted)), n


@may_run_live
@pytest.mark.parametrize("end", [Nested.__exit__, standing.ended.__exit__, Cuts.__exit__], ids=lambda end: end.__qualname__)
def test_c12_what_ends_a_block_fails_at_once_in_a_capture(device, caplog, end):
    """That is contained, and the call runs live: nobody else takes back what stands."""
    caplog.set_level(logging.CRITICAL, "phonograph")
    eager, count, failures = Trainer(device), [0], 0
    eager.step(ramp(device, 4, 3).cos())
    eager.step(ramp(device, 4, 3).cos() + 1)
    for n in range(1, 30):
        trainer = Trainer(device)
        recorded = pg.record(trainer.step, keep="always", fallback="split")
        recorded(ramp(device, 4, 3).cos())
        before, count[0] = house(), 0

        def trace(frame, event, arg, n=n):
            if event == "call" and frame.f_code is end.__code__:
                count[0] += 1
                if count[0] == n:
                    raise MemoryError("injected")

        sys.settrace(trace)
        try:
            recorded(ramp(device, 4, 3).cos() + 1)
        except MemoryError:  # where nothing is contained
            failures += 1
        finally:
            sys.settrace(None)
        assert house() == before, n
        if count[0] < n:
            break
        if not failures:
            assert is_same(trainer.state(), eager.state()), n
    assert n > 1, "it was not met"


@may_run_live
@pytest.mark.parametrize("times", [1, 2])
def test_c12_what_a_capture_has_written_cannot_be_put_back(monkeypatch, caplog, times):
    """It is tried again; then the call does not run live on top of it."""
    total, left = torch.zeros(2), [MemoryError("injected")] * times
    recorded = pg.record(lambda x: total.add_(x).sum(), keep="always")
    recorded(torch.ones(2))
    real = Tape.undo

    def undo(tape):
        if left:
            raise left.pop()
        real(tape)

    monkeypatch.setattr(Tape, "undo", undo)
    if times == 1:
        recorded(torch.ones(2))
        assert total.tolist() == [2, 2]
    else:
        with pytest.raises(NotPutBack, match="MemoryError: injected"):
            recorded(torch.ones(2))


def test_c12_all_is_put_back_though_one_thing_cannot_be(device, monkeypatch):
    weight = torch.ones(2, device=device, requires_grad=True)

    def step(x):
        weight.mul(x).sum().backward()
        raise ValueError("mine")

    def fails(snapshot):
        raise ZeroDivisionError("a bug")

    state, recorded = torch.is_grad_enabled(), pg.record(step, warmup=0)
    monkeypatch.setattr(Snapshot, "restore", fails)
    assert transaction.Snapshot is Snapshot
    with pytest.raises(NotPutBack, match="a bug"):
        recorded(torch.ones(2, device=device))
    assert (weight.grad, torch.is_grad_enabled()) == (None, state)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_c12_a_fork_while_another_thread_captures(monkeypatch):
    """The child has none of what the other thread has begun, and records."""
    net = torch.nn.Linear(3, 3)
    pg.record(lambda x: x + 1, warmup=0)(torch.ones(3))  # what is imported for the first capture is
    before, (begun, begins), (goes_on, ends), real = house(), os.pipe(), os.pipe(), Tape.perform

    def perform(tape, *given):
        if threading.current_thread() is thread and not waited:
            waited.append(True)
            os.write(begins, b"x")
            os.read(goes_on, 1)
        return real(tape, *given)

    def captures():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pg.record(lambda x: net(x).sin(), warmup=0)(torch.ones(3))

    waited, thread = [], threading.Thread(target=captures)
    monkeypatch.setattr(Tape, "perform", as_ours(perform, real))
    thread.start()
    os.read(begun, 1)
    inside = house()
    child = os.fork()
    if not child:
        status = 1
        try:
            found = house()
            differs = [key for key in before if found[key] != before[key]]
            f = pg.record(lambda x: net(x).cos(), warmup=0)
            right = all(torch.equal(f(torch.ones(3)), net(torch.ones(3)).cos()) for _ in range(3))
            status = 0 if not differs and right and pg.stats(f).replayed == 3 else 2
        finally:
            os._exit(status)
    os.write(ends, b"x")
    thread.join()
    for fd in (begun, begins, goes_on, ends):
        os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert {"collector", "nested", "standing", ("Tensor", "tolist")} <= {key for key in before if inside[key] != before[key]}
    assert house() == before


def test_c17_a_reset_out_of_the_middle_of_a_call(device):
    """From a signal handler, a finalizer or a callback of the collector, wherever one may run."""
    weight = torch.ones(3, device=device)

    def run(n, calls):
        recorded, count = pg.record(lambda x: x.sin() * weight, keep="always"), [0]

        def trace(frame, event, arg):
            if event == "call" and frame.f_code.co_filename.startswith(HOME):
                count[0] += 1
                if count[0] == n:
                    sys.settrace(None)
                    pg.reset(recorded)

        for i in range(6):
            x = ramp(device, 3, start=i)
            if i == calls:
                sys.settrace(trace)
            try:
                result = recorded(x)
            finally:
                sys.settrace(None)
            assert_same(result, x.sin() * weight)
        return count[0], pg.stats(recorded)

    for calls, stride in ((0, 13), (1, 97), (3, 1)):
        count, _ = run(0, calls)
        for n in range(1, count, stride):
            _, stats = run(n, calls)
            assert stats.recorded + stats.live > 1
    assert stats.recorded == 2  # it was reset by the next call
