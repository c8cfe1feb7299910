"""C10: what Python does not show is found by an audit, and said: the call runs dry once more, and leaves nothing behind."""

import decimal
import gc
import warnings

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.capture.digest import Comparison, Digest, Recompiled
from phonograph.capture.notes import Look
from phonograph.engine import audit
from phonograph.testing import assert_same
from tests.helpers import ramp


@pytest.fixture
def audits(monkeypatch):
    """After how many replays there were audits, of any recording."""
    found = []
    looked = audit.difference

    def counted(name, function, call, player, *others):
        found.append(player.played)
        return looked(name, function, call, player, *others)

    monkeypatch.setattr(audit, "difference", counted)
    return found


def test_c10_audits_are_rare(device, audits):
    recorded, x = pg.record(lambda x: x * 2, audit=600), ramp(device, 3)
    for n in range(1300):
        assert_same(recorded(x), x * 2) if n % 100 == 0 else recorded(x)
    assert audits == [8, 64, 512, 600, 1200]
    assert pg.stats(recorded).recorded == 1
    assert "audited after 1200 replays" in pg.explain(recorded)


def test_c10_no_audits_where_none_are_wanted(device, audits):
    recorded, x = pg.record(lambda x: x * 2, audit=0), ramp(device, 3)
    for _ in range(20):
        recorded(x)
    assert audits == []
    assert "audited" not in pg.explain(recorded)


def test_c10_what_python_does_not_show_is_found_by_the_next_audit(device, hidden):
    recorded, x = pg.record(lambda x: x * decimal.getcontext().prec + 1, audit=4), ramp(device, 3)
    for _ in range(7):
        assert_same(recorded(x), x * 2 + 1)
    assert pg.stats(recorded).recorded == 1
    hidden.prec = 3
    with pytest.warns(pg.Stale, match=r"prec.*other numbers.*test_audits\.py:\d+.*last \d replays"):
        results = [recorded(x) for _ in range(5)]
    right = [torch.equal(result, x * 3 + 1) for result in results]
    assert right == sorted(right)
    assert right[-1]
    assert pg.stats(recorded).recorded == 2
    for _ in range(9):
        assert_same(recorded(x), x * 3 + 1)


def another_operator(x, n):
    return x.sin() if n == 3 else x * 2


def one_more(x, n):
    return x * 2 + 1 if n == 3 else x * 2


def one_less(x, n):
    return x * 2 if n == 3 else x * 2 + 1


def another_tensor(x, n):
    y, z = x + 1, x + 2
    return (y if n == 3 else z) * 2


def a_constant(x, n):
    return x * torch.tensor([1.0, n, 0.0]).to(x.device) if x.is_cpu else x.roll(n)


def another_result(x, n):
    return x * 2, n


def another_shape(x, n):
    return (x * 2)[:n]


@pytest.mark.parametrize("f", [another_operator, one_more, one_less, another_tensor, a_constant, another_result, another_shape])
def test_c10_an_audit_of_each_replay_is_never_late(device, hidden, f):
    recorded, x = pg.record(lambda x: f(x, decimal.getcontext().prec), audit=1), ramp(device, 3)
    for _ in range(5):
        assert_same(recorded(x), f(x, 2))
    hidden.prec = 3
    with pytest.warns(pg.Stale):
        assert_same(recorded(x), f(x, 3))
    for _ in range(5):
        assert_same(recorded(x), f(x, 3))
    assert pg.stats(recorded).recorded == 2


def test_c10_what_changes_again_and_again_runs_live(device, hidden):
    recorded, x = pg.record(lambda x: x * decimal.getcontext().prec, audit=1), ramp(device, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(60):
            hidden.prec = 2 + n // 3
            assert_same(recorded(x), x * hidden.prec)
    assert pg.stats(recorded).recorded < 12
    assert "changes from call to call" in pg.explain(recorded)


def training(device, made):
    """A step of training with all that an audit may leave behind: dropout, running statistics, moments and a schedule."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return made(step), model, optimizer


def state_of(model, optimizer):
    found = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    found += [t for s in optimizer.state.values() for t in s.values()]
    return [t.clone() for t in found], [p._version for p in model.parameters()]


def test_c12_an_audit_leaves_nothing_behind(device, audits):
    sides = []
    for made in (lambda f: pg.record(f, audit=1), lambda f: pg.record(f, audit=0), lambda f: f):
        step, model, optimizer = training(device, made)
        torch.manual_seed(0)
        results = [step(ramp(device, 3, 4, start=n)) for n in range(10)]
        draws = torch.rand(2, device=device)
        sides.append((results, draws, *state_of(model, optimizer), step))
    (*ours, versions, audited), (*_, as_many, recorded), (*plain, _, _) = sides
    assert_same(ours, plain)
    assert versions == as_many
    assert pg.stats(audited) == pg.stats(recorded)
    assert len(audits) >= 6


def test_c09_a_number_that_is_followed_is_no_difference(device, audits):
    step, _model, optimizer = training(device, lambda f: pg.record(f, audit=1))
    for n in range(10):
        optimizer.param_groups[0]["lr"] = 0.1 / (n + 1)
        step(ramp(device, 3, 4))
    assert pg.stats(step).recorded <= 2, pg.explain(step)
    assert len(audits) >= 6


def test_c06_an_audit_of_a_model_whose_backward_runs_outside(device, audits):
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    model.load_state_dict(plain.state_dict())
    model = pg.record(model, audit=1)
    for n in range(9):
        x = ramp(device, 3, 4, start=n)
        for net in (model, plain):
            net.zero_grad()
            net(x).sin().sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same(p.grad, q.grad)
    assert len(audits) >= 5, pg.explain(model)
    assert pg.stats(model).recorded == 1


def test_c09_a_marked_function_runs_once_a_call_where_it_is_audited(device, audits):
    calls = []

    @pg.live
    def tell(x):
        calls.append(1)

    def f(x):
        y = x * 2
        tell(y)
        return y + 1

    recorded = pg.record(f, audit=1)
    for n in range(8):
        x = ramp(device, 3, start=n)
        assert_same(recorded(x), x * 2 + 1)
        assert len(calls) == n + 1
    assert audits, pg.explain(recorded)
    assert pg.stats(recorded).recorded == 1


def test_c05_what_is_held_is_not_touched_by_an_audit(device, audits):
    recorded = pg.record(lambda x: (x * 2 + 1) @ x, audit=1)
    held = [(n, recorded(ramp(device, 40, 40, start=n))) for n in range(9)]
    for n, result in held:
        x = ramp(device, 40, 40, start=n)
        assert_same(result, (x * 2 + 1) @ x)
    assert audits


def test_c11_a_function_that_cannot_be_recorded_any_more_is_stale(device, hidden):
    def f(x):
        return x * x.sum().item() if decimal.getcontext().prec == 3 else x * 2

    recorded, x = pg.record(f, audit=1), ramp(device, 3)
    for _ in range(4):
        assert_same(recorded(x), x * 2)
    hidden.prec = 3
    with pytest.warns(pg.Stale):
        assert_same(recorded(x), f(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pg.RunsLive)
        for _ in range(4):
            assert_same(recorded(x), f(x))


def test_c13_what_the_function_raises_now_reaches_the_caller(device, hidden):
    def f(x):
        if decimal.getcontext().prec == 3:
            raise KeyError("three")
        return x * 2

    recorded, x = pg.record(f, audit=1), ramp(device, 3)
    for _ in range(4):
        recorded(x)
    hidden.prec = 3
    for _ in range(2):
        with pytest.raises(KeyError, match="three"):
            recorded(x)
    hidden.prec = 2
    assert_same(recorded(x), x * 2)
    assert pg.stats(recorded).recorded == 1


def test_c13_data_that_make_it_raise_are_no_change(device):
    if device.type == "cuda":
        pytest.skip("there it is said by a later call")
    table = ramp(device, 3)
    recorded = pg.record(lambda i: table[i] * 2, audit=1)
    for n in range(12):
        i = torch.tensor([n % 4])
        if n % 4 < 3:
            assert_same(recorded(i), table[i] * 2)
        else:
            with pytest.raises(IndexError):
                recorded(i)
    assert pg.stats(recorded).recorded == 1


def test_c06_nobody_holds_a_gradient_after_an_audit(device, audits):
    torch.manual_seed(0)
    net = nn.Linear(3, 2, device=device)
    step = pg.record(lambda x: net(x).square().mean().backward(), audit=1)
    gc.disable()  # what a dry run has made goes by itself
    try:
        for n in range(16):
            if n % 4 == 0:
                net.zero_grad()
            step(ramp(device, 4, 3, start=n))
    finally:
        gc.enable()
    assert pg.stats(step).live <= 2, pg.explain(step)
    assert pg.stats(step).recorded <= 3
    assert len(audits) >= 6


def test_c19_explain_says_what_is_not_audited(device):
    model = pg.record(nn.Linear(4, 2).to(device), audit=1)
    for n in range(5):
        model(ramp(device, 3, 4, start=n)).sum().backward()
    assert "not audited: it is a backward that runs outside of the call" in pg.explain(model)


def test_c10_a_step_that_differentiates_its_gradient(device):
    """On a GPU a thread of autograd's makes the nodes of the gradient, and numbers them apart from the program's: which of them
    a backward runs first hangs on what both threads have done before."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)

    def step(x):
        net.zero_grad()
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (slope.square().sum() + net(x).square().sum()).backward()
        return slope.detach()

    step = pg.record(step, audit=1, keep="always")
    with warnings.catch_warnings():
        warnings.simplefilter("error", pg.Stale)
        for n in range(12):
            step(ramp(device, 3, 4, start=n))
            x = ramp(device, 3, 4).requires_grad_()
            for _ in range(200):  # autograd's thread makes more nodes here than the program's
                torch.autograd.grad(x.sin().cos().sum(), x, create_graph=True)
    assert pg.stats(step).replayed >= 8, pg.explain(step)
    assert ("not audited: it differentiates a backward" in pg.explain(step)) == (device.type == "cuda")


def test_c05_borrowed_results_and_audits(device, audits):
    """A function that lends its results is audited; one that is given such is not, in those calls."""
    lends = pg.record(lambda x: (x * 2, x + 1), outputs="borrow", audit=1)
    takes = pg.record(lambda a, b: a @ b.T, audit=1, keep="always")
    for n in range(9):
        x = ramp(device, 4, 4, start=n)
        a, b = lends(x)
        assert_same(a.clone(), x * 2)
        assert_same(takes(a, b), (x * 2) @ (x + 1).T)
    assert "audited after" in pg.explain(lends)
    assert "audited after" not in pg.explain(takes)
    assert pg.stats(lends).recorded == 1
    assert len(audits) >= 8


class Extractor(nn.Module):
    """Gives the very dictionary that its hook fills."""

    def __init__(self, device):
        super().__init__()
        self.net, self.features = nn.Linear(4, 4, device=device), {"out": torch.empty(0)}
        self.net.register_forward_hook(self.keep)

    def keep(self, module, args, out):
        self.features["out"] = out

    def forward(self, x):
        self.net(x)
        return self.features


def foreach(device):
    model = nn.Linear(4, 4, device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)

    def step(x, head):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def two_heads(device):
    """Only the weights of one head have a gradient: others' step counts stay behind."""
    heads = nn.ModuleList([nn.Linear(4, 4, device=device) for _ in range(2)])
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.01, foreach=True)

    def step(x, head):
        optimizer.zero_grad(set_to_none=True)
        heads[head](x).square().mean().backward()
        optimizer.step()

    return step


def hooked(device):
    extractor = Extractor(device)
    return lambda x, head: torch.no_grad()(extractor)(x)


def a_view(device):
    return torch.no_grad()(lambda x, head: (x + 1, x[1:]))


@pytest.mark.parametrize("make", [foreach, two_heads, hooked, a_view])
def test_c10_no_false_alarm(device, audits, make):
    """What the call works with is named alike in each dry run, whatever has changed in between and is no part of it."""
    torch.manual_seed(0)
    audited, others = (pg.record(make(device), audit=n, keep="always") for n in (1, 0))
    for n in range(18):
        x, head = ramp(device, 3, 4, start=n).requires_grad_(make is a_view), int(n > 4)
        audited(x, head)
        others(x, head)
    assert pg.stats(audited).recorded == pg.stats(others).recorded, pg.explain(audited)
    assert len(audits) >= 5


def test_c10_what_was_called_is_worked_out_at_the_first_audit(device, audits):
    """Until then a recording has notes, which hold no tensors: many are never audited."""
    x, weight = ramp(device, 2, 3), ramp(device, 3, 3)
    recorded = pg.record(lambda x: (x @ weight).relu() * 2.5, keep="always")
    recorded(x)
    recorded(x)
    (player,) = recorded._shelf
    digest = player.recording.retrace.digest
    assert not {*map(type, held_by(digest._rows))} & {torch.Tensor, torch.UntypedStorage}
    assert len(digest._rows) == len(digest.names) >= 3
    assert not digest._hashes
    while not audits:
        recorded(x)
    assert len(digest._hashes) == 8 * len(digest.names)
    assert not digest._rows
    assert pg.stats(recorded).recorded == 1


def held_by(rows):
    """What is in these, and in what these have."""
    for x in rows:
        yield x
        parts = [x.kind, x.offset] if type(x) is Look else [*x.values()] if isinstance(x, dict) else x
        yield from held_by(parts) if isinstance(parts, (list, tuple)) and not isinstance(x, torch.Size) else ()


def test_c10_code_compiled_anew_is_recorded_again(device, monkeypatch, caplog):
    """For sizes of any kind, say. What was recorded is what the code gave then: that is logged, and nobody is warned."""
    then, first, second = Digest(), nn.Module(), nn.Module()  # which stand for graphs
    then.note_graph(first)
    Comparison(then).note_graph(first)
    with pytest.raises(Recompiled):
        Comparison(then).note_graph(second)

    found = iter([None, None, Recompiled()])
    monkeypatch.setattr(audit, "difference", lambda *args: next(found, None))
    step, x = pg.record(lambda x: x * 2 + 1, audit=1, keep="always"), ramp(device, 3)
    for _ in range(12):
        assert_same(step(x), x * 2 + 1)
    assert (pg.stats(step).recorded, pg.stats(step).live) == (2, 2), pg.explain(step)
    assert "changed 1x: code that was compiled anew" in pg.explain(step)
    assert [r.levelname for r in caplog.records if "compiled anew" in r.getMessage()] == ["WARNING"]
