"""What runs live in a backward, or before one: operators that need the host, and functions that are marked `@pg.live`."""

import copy
import gc
import re
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, side_by_side


def ramp(device, *shape, start=0.0):
    n = torch.Size(shape).numel()
    return torch.arange(start, start + n, device=device).reshape(shape) / 8 - 0.5


def backwards(recorded):
    return [*pg.api._recorded(recorded)._backwards]


def live_parts(recorded):
    return [line for line in pg.explain(recorded).split("\n") if "live between its segments: " in line]


class Masked(nn.Module):
    """Writes where a mask says, and so counts on the host, forth and back: `count` columns, or as many as it gives."""

    def __init__(self, count=2):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.count, self.values = count, nn.Parameter(torch.linspace(0.5, 1.5, count or 1))

    def forward(self, x):
        y = self.first(x) * 1.0
        sums = y.detach().sum(0)
        mask = sums > sums.sort()[0][-1 - self.count] if self.count else sums > 0
        y[:, mask] = self.values
        return self.last(y.relu())


def make_step(net, device):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)

    def step(x):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, (net, optimizer)


def test_c06_a_step_whose_backward_needs_the_host(device):
    def make():
        torch.manual_seed(0)
        return make_step(Masked().to(device), device)

    both = side_by_side(make, fallback="split")
    for n in range(9):
        both(ramp(device, 4, 6, start=n))
        both.check()
    assert counts(both) == (4, 1, 5), pg.explain(both.recorded)  # a look at each of three operators
    assert len(live_parts(both.recorded)) == 3, pg.explain(both.recorded)  # one forth, two back


def pairs(make, device, calls=9, rows=4, leaf=True, **options):
    """A model trained live and recorded, with its backward outside; with `leaf`, its argument gets a gradient as well. Returns
    the recorded one."""
    torch.manual_seed(0)
    live = make().to(device)
    ours = pg.record(copy.deepcopy(live), warmup=1, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (ours, live)]
    for n in range(calls):
        seen = []
        for m, optimizer in zip((ours, live), optimizers, strict=True):
            torch.manual_seed(n)
            optimizer.zero_grad()
            x = ramp(device, rows, 6, start=n).requires_grad_(leaf)
            y = m(x)
            (y.square().mean() + torch.rand((), device=device)).backward()
            optimizer.step()
            tensors = [y, *([x.grad] * leaf), *m.parameters(), *(p.grad for p in m.parameters())]
            seen.append([torch.rand(2, device=device), *(t.detach().clone() for t in tensors)])
            del y, tensors
        assert_same(*seen, f"call {n}: ")
    return ours


def test_c06_a_model_whose_forward_and_backward_need_the_host(device):
    ours = pairs(Masked, device, fallback="split")
    assert pg.stats(ours).replayed >= 6, pg.explain(ours)
    assert sum(pg.stats(b).replayed for b in backwards(ours)) >= 4, pg.explain(ours)
    names = {re.search(r"segments: ([\w:.]+)", line)[1] for line in live_parts(ours)}
    assert names >= {"aten::index_put_", "aten::index.Tensor"}


@may_run_live
def test_c06_where_such_a_backward_begins_again(device):
    """As many columns as come: what is made of another shape than before is made live."""
    ours = pairs(lambda: Masked(0), device, calls=16, fallback="split")
    assert pg.stats(ours).replayed >= 6, pg.explain(ours)


@may_run_live
def test_c06_such_a_model_that_is_not_to_be_cut_runs_live(device):
    ours = pairs(Masked, device, fallback="live")
    assert pg.stats(ours).replayed == 0


NOTES = []


@pg.live
def note(t):
    NOTES.append(t.double().sum().item())
    if len(NOTES) == note.fails:
        raise ValueError("the user's")


@pg.live
def gain(t):
    NOTES.append(tuple(t.shape))
    return t.detach() * 0 + 1.0 + len(NOTES) % 3


note.fails = -1


class Gained(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (cos,) = ctx.saved_tensors
        return grad * cos * gain(grad)


class Noting(nn.Module):
    """Marked functions in the forward, as hooks, in a backward of its own, in a part that is recomputed."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x):
        h = self.first(x)
        if self.where == "forward":
            h = self.dropout(h * gain(h))
        elif self.where == "hook" and h.requires_grad:
            h.register_hook(note)
        elif self.where == "hook that gives" and h.requires_grad:
            h.register_hook(gain)
        elif self.where == "function":
            h = Gained.apply(h)
        elif self.where.startswith("recomputed"):
            again = self.where.endswith("draws")
            return checkpoint(self._end, h, use_reentrant="reentrant" in self.where, preserve_rng_state=again)
        return self._end(h)

    def _end(self, h):
        if self.where.startswith("recomputed"):
            note(h)
            h = h * gain(h)
        if self.where.endswith("draws"):
            h = self.dropout(h)
        return self.last(h.tanh())


WHERE = ("forward", "hook", "hook that gives", "function", "recomputed", "recomputed, reentrant", "recomputed, draws")


def recorded_as(where):
    """Where an exception would have to put back the state of the generator, the whole runs live, or its backward."""
    return not where.endswith("draws")


@pytest.fixture
def notes():
    NOTES.clear()
    note.fails = -1
    yield NOTES
    NOTES.clear()


def log_of(run):
    """What a run has noted; the list is as long at the begin of each."""
    NOTES.clear()
    run()
    return [*NOTES]


@may_run_live
@pytest.mark.usefixtures("notes")
@pytest.mark.parametrize("where", WHERE)
def test_c12_marked_functions_in_a_step(device, where):
    found, steps = [], []
    for record in (False, True):
        torch.manual_seed(0)
        step, (net, _) = make_step(Noting(where).to(device), device)
        step = pg.record(step, warmup=1) if record else step

        def run(step=step, net=net):
            seen = []
            for n in range(8):
                seen.append([step(ramp(device, 4, 6, start=n)), *(p.detach().clone() for p in net.parameters())])
            found.append(seen)

        steps.append((step, log_of(run)))
    assert_same(found[1], found[0])
    assert steps[1][1] == steps[0][1]
    assert len(steps[0][1]) >= 8
    if recorded_as(where):
        assert counts(steps[1][0]) == (1, 1, 7), pg.explain(steps[1][0])


@may_run_live
@pytest.mark.usefixtures("notes")
@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("where", WHERE)
def test_c12_marked_functions_in_a_model(device, where, retain):
    found, logs, models = [], [], []
    for record in (False, True):
        torch.manual_seed(0)
        net = Noting(where).to(device)
        models.append(pg.record(net, warmup=1) if record else net)

        def run(net=net):
            seen = []
            for n in range(8):
                x = ramp(device, 4, 6, start=n).requires_grad_()
                net.zero_grad()
                loss = net(x).square().mean()
                if retain:
                    loss.backward(retain_graph=True)
                loss.backward()
                seen.append([*map(torch.clone, (loss.detach(), x.grad, *(p.grad for p in net.parameters())))])
            found.append(seen)

        logs.append(log_of(run))
    assert_same(found[1], found[0])
    assert logs[1] == logs[0]
    assert len(logs[0]) >= 8
    if recorded_as(where):
        assert counts(models[1]) == (1, 1, 7), pg.explain(models[1])
        assert sum(pg.stats(b).replayed for b in backwards(models[1])) >= 4, pg.explain(models[1])


@may_run_live
@pytest.mark.usefixtures("notes")
@pytest.mark.parametrize("where", ["hook", "recomputed"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("at", range(1, 13))
def test_c13_one_that_raises_in_a_backward(device, where, inside, at):
    """The exception is the user's; then all is as before."""
    found = []
    for record in (False, True):
        torch.manual_seed(0)
        net = Noting(where).to(device)
        if inside:
            step, _ = make_step(net, device)
            step = pg.record(step, warmup=1) if record else step
        else:
            net = pg.record(net, warmup=1) if record else net

            def step(x, net=net):
                net.zero_grad()
                loss = net(x).square().mean()
                loss.backward()
                return loss.detach()

        NOTES.clear()
        note.fails, seen = at, []
        for n in range(9):
            try:
                seen.append(step(ramp(device, 4, 6, start=n)).clone())
            except ValueError as e:
                seen.append(str(e))
                net.zero_grad()
                continue
            seen.append([p.grad.clone() for p in net.parameters()])
        found.append((seen, [*NOTES], [p.detach().clone() for p in net.parameters()]))
    assert_same(found[1], found[0])


@may_run_live
@pytest.mark.usefixtures("notes")
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("where", [w for w in WHERE if w != "recomputed, reentrant"])
def test_c06_several_forwards_in_flight(device, where, order):
    found, logs = [], []
    for record in (False, True):
        torch.manual_seed(0)
        net = Noting(where).to(device)
        net = pg.record(net, warmup=1) if record else net

        def run(net=net):
            seen = []
            for n in range(8):
                net.zero_grad()
                losses = [net(ramp(device, 4, 6, start=n + i)).square().mean() for i in range(2)]
                for i in order:
                    losses[i].backward()
                seen.append([*map(torch.clone, (*map(torch.detach, losses), *(p.grad for p in net.parameters())))])
            found.append(seen)

        logs.append(log_of(run))
    assert_same(found[1], found[0])
    assert logs[1] == logs[0]


@torch.library.custom_op("phonograph_tests::by_its_largest", mutates_args=())
def by_its_largest(x: torch.Tensor) -> torch.Tensor:
    return x * (x.abs().max().item() > 0) * 0.5


class Halved(torch.autograd.Function):
    """Whose backward needs the host."""

    @staticmethod
    def forward(ctx, x):
        return x * 0.5

    @staticmethod
    def backward(ctx, grad):
        return by_its_largest(grad)


class Branches(nn.Module):
    """When the backward comes to what needs the host, it has the gradients of other branches in hand, in memory that had been
    saved for what is behind it."""

    def __init__(self, rows, shift):
        super().__init__()
        self.branches, self.last = nn.ModuleList(nn.Linear(6, 64 + 8 * n) for n in range(5)), nn.Linear(64, 64)
        self.rows, self.shift = rows, shift

    def forward(self, x):
        found = [branch(x)[:, :64].sin() for branch in self.branches]
        found.insert(self.shift, Halved.apply(found.pop(self.shift).tanh()))
        y = found[0]
        for other in found[1:]:
            y = (y * other).cos() + y
            y = y / y.square().mean(-1, keepdim=True).sqrt()
        return self.last(y)


@pytest.mark.parametrize("rows", [2, 64, 700])
@pytest.mark.parametrize("shift", range(5))
def test_c06_what_autograd_has_in_hand_where_a_capture_fails(device, rows, shift):
    ours = pairs(lambda: Branches(rows, shift), device, rows=rows, leaf=False, fallback="split")
    assert sum(pg.stats(b).replayed for b in backwards(ours)) >= 5, pg.explain(ours)
    assert any("by_its_largest" in line for line in live_parts(ours)) is (device.type == "cuda"), pg.explain(ours)


@pg.live
def keeps_count_of(t):
    """Saves tensors for a backward that nobody asks for: `checkpoint` counts what a part saves."""
    NOTES.append((t.exp().square() * t.norm()).sum().item())


class Noted(nn.Module):
    def __init__(self, divergent=False, late=False):
        super().__init__()
        self.a, self.divergent, self.late = nn.Linear(6, 6), divergent, late

    def part(self, h):
        h = self.a(h)
        keeps_count_of(h)
        y = h * h.cos() * (h + 1)
        return y.tanh() if self.late else y

    def forward(self, x):
        y = checkpoint(self.part, x, use_reentrant=False, preserve_rng_state=False)
        return y + y.detach()[x[:, 0].sin() > 0].sum() if self.divergent else y


@may_run_live
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("divergent", [False, True])
@pytest.mark.parametrize("fallback", ["live", "split"])
def test_c06_a_marked_function_in_a_part_that_is_recomputed(device, divergent, late, fallback):
    ours = pairs(lambda: Noted(divergent, late), device, calls=12, fallback=fallback)
    left = [weakref.ref(t) for p in ours.parameters() for t in (p, p.grad)]
    del ours
    gc.collect()
    assert all(ref() is None for ref in left)  # what it saves is no result that holds its own node


@may_run_live
@pytest.mark.parametrize("late", [False, True])
def test_c06_a_marked_function_in_such_a_part_where_a_step_begins_again(device, late):
    def make():
        torch.manual_seed(0)
        return make_step(Noted(True, late).to(device), device)

    both = side_by_side(make, fallback="split")
    for n in range(12):
        both(ramp(device, 4, 6, start=n * 3.0))
        both.check()


class Hooked(nn.Module):
    """What runs in its backward would be noticed: it draws, writes buffers, or is marked."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.norm, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.how = how

    def part(self, h):
        return self.norm(self.b(h))

    def forward(self, x):
        h = self.a(x)
        if self.how == "draws":
            h.register_hook(lambda g: g + torch.randn_like(g))
        if self.how == "marked":
            h.register_hook(note)
        h = checkpoint(self.part, h, use_reentrant=False) if self.how == "recomputes" else self.part(h)
        return self.c(h.relu())


CHOSEN = {
    "grad": lambda loss, m: torch.autograd.grad(loss, [*m.c.parameters()]),
    "inputs": lambda loss, m: loss.backward(inputs=[*m.c.parameters()]),
    "grad of a": lambda loss, m: torch.autograd.grad(loss, [m.a.weight]),
    "inputs, and all": lambda loss, m: (loss.backward(inputs=[m.c.bias], retain_graph=True), loss.backward()),
    "grad, and all": lambda loss, m: (torch.autograd.grad(loss, m.c.bias, retain_graph=True), loss.backward()),
}


@may_run_live
@pytest.mark.parametrize("how", ["draws", "marked", "recomputes", "nothing"])
@pytest.mark.parametrize("way", CHOSEN)
def test_c06_gradients_of_chosen_inputs_run_no_more_than_leads_there(device, way, how):
    torch.manual_seed(0)
    live = Hooked(how).to(device)
    ours = pg.record(copy.deepcopy(live), warmup=1)
    for n in range(6):
        seen = []
        for m in (ours, live):
            torch.manual_seed(n)
            NOTES.clear()
            m.zero_grad()
            loss = m(ramp(device, 5, 6, start=n).sin()).square().mean()
            found = CHOSEN[way](loss, m)
            grads = [None if p.grad is None else p.grad.clone() for p in m.parameters()]
            seen.append([found, grads, [b.clone() for b in m.buffers()], torch.rand(2, device=device), [*NOTES]])
            del found, loss
        assert_same(*seen, f"call {n}: ")


class Balanced(nn.Module):
    """A hook looks at a gradient that the same backward has added."""

    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.a(x)
        h.register_hook(lambda g: g / g.norm() * (self.c.weight.grad.norm() if self.c.weight.grad is not None else 1.0))
        return self.c(h.tanh())


@may_run_live
def test_c06_a_hook_that_looks_at_gradients(device):
    ours = pairs(Balanced, device)
    assert "may look at gradients" in pg.explain(ours)


@torch.library.custom_op("phonograph_tests::cast_within", mutates_args=())
def cast_within(x: torch.Tensor) -> torch.Tensor:
    return (x.float() @ x.float().T).float() * (x.abs().max().item() > 0)


class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.a(x)
        h = h + h[x[:, 0] > -1e9].sum(0) + cast_within(h.detach()).sum()
        with torch.autocast(x.device.type, enabled=False):
            h = h.float() + cast_within(x.detach()).sum() + h[x[:, 0] > -1e9].float().mean()
        return self.b(h)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c06_a_model_that_needs_the_host_under_autocast(device, dtype):
    torch.manual_seed(0)
    live = Cast().to(device)
    ours = pg.record(copy.deepcopy(live), warmup=1, fallback="split")
    for n in range(9):
        seen = []
        for m in (ours, live):
            m.zero_grad()
            with torch.autocast(device.type, dtype=dtype):
                y = m(ramp(device, 4, 6, start=n))
            y.float().square().mean().backward()
            seen.append([y.detach().clone(), *(p.grad.clone() for p in m.parameters())])
        assert_same(*seen, f"call {n}: ")
    assert pg.stats(ours).replayed >= 5, pg.explain(ours)  # a process may use a library for the first time here


@torch.library.custom_op("phonograph_tests::cast_before", mutates_args=())
def cast_before(x: torch.Tensor) -> torch.Tensor:
    return (x.float() @ x.float().T).float()


for kind in ("cpu", "cuda"):
    cast_before.register_autocast(kind, torch.bfloat16)


@torch.library.custom_op("phonograph_tests::cast_inside", mutates_args=())
def cast_inside(x: torch.Tensor) -> torch.Tensor:
    return (x.float() @ x.float().T).float()


def in_regions(x):
    """Code of others', which calls what is cast, where autocast is as outside, on, off, and as before."""
    found = [cast_inside(x), cast_before(x)]
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        found += [cast_inside(x), cast_before(x)]
        with torch.autocast(x.device.type, enabled=False):
            found += [cast_inside(x), cast_before(x)]
        found.append(cast_inside(x + 1))
    return [*found, cast_inside(x + 2)]


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_c09_autocast_in_code_of_others(device, outside, live):
    """Recorded, and where it runs live between segments. The class of regions is afterwards as it was."""
    begin = torch.autocast.__enter__
    names = torch.ops.phonograph_tests
    cut = {"fallback": "split", "split_at": [names.cast_inside.default, names.cast_before.default]} if live else {}
    both = side_by_side(lambda: in_regions, **cut)
    for n in range(5):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=outside):
            both((ramp(device, 6, 6, start=n) * 1.7).sin())
            assert torch.is_autocast_enabled(device.type) is outside
    assert pg.stats(both.recorded).replayed == 4, pg.explain(both.recorded)
    assert len(live_parts(both.recorded)) == 8 * live
    assert torch.autocast.__enter__ is begin
