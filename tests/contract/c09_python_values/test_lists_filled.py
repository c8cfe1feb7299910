"""C1, C5, C9: lists that outlive a call and are filled anew in each (`losses.clear(); losses.extend(…)`): a replay leaves in
them what the call would have, whoever reads, keeps or replaces what stands there."""

from collections import deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.engine import budget, making
from phonograph.guards.carried_state import CONTENTS, Carried, Place
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp, reasons

CALLS = 8


class Keeper:
    def __init__(self, device):
        self.parts, self.others = [], []
        self.window = deque([torch.zeros(3, device=device) for _ in range(3)], maxlen=3)
        self.w = torch.full((3,), 2.0, device=device)
        self.alias = self.parts

    def held(self):
        return [[*x] for x in (self.parts, self.others, self.window)]


def cleared_and_appended(k, x):
    k.parts.clear()
    for i in range(3):
        k.parts.append(x * k.w + i)
    return torch.stack(k.parts).sum(0)


def extended(k, x):
    k.parts.clear()
    k.parts.extend([x + 1, x + 2])
    return x * 2


def set_at_once(k, x):
    before = sum(p.sum() for p in k.parts)
    k.parts[:] = [x * k.w, x - 1]
    return x + before


def item_by_item(k, x):
    if not k.parts:
        k.parts.extend([x, x * 2])
        return x
    k.parts[1] = k.parts[0] + k.parts[1]
    k.parts[0] = x + 1
    return k.parts[1] * 3


def moved_along(k, x):
    k.window.append(x * 2)
    return torch.stack([*k.window]).sum(0)


def turned_round(k, x):
    k.window.popleft()
    k.window.append(x + k.window[-1])
    return k.window[0] * 1


def swapped(k, x):
    k.parts[:], k.others[:] = [x + 1, *(k.others[:1] or [x])], [x * 2, *(k.parts[:1] or [x])]
    return x.sum()


def of_pairs(k, x):
    k.parts[:] = [(x, x + 1), None, {"a": x * 2}]
    return x * 3


def by_another_name(k, x):
    k.alias.clear()
    k.parts.append(x * 2)
    return k.alias[0] + 1


def an_argument_is_kept(k, x):
    last = k.parts[0] if k.parts else x * 0
    k.parts[:] = [x]
    return last + x


RECORDED = [cleared_and_appended, extended, set_at_once, item_by_item, moved_along, turned_round, swapped, of_pairs,
            by_another_name, an_argument_is_kept]  # fmt: skip


def grows(k, x):
    k.parts.append(x * 2)
    k.others[:] = k.parts[-2:]
    return torch.stack(k.parts).sum(0)


def of_numbers(k, x):
    k.parts[:] = [len(k.parts) + 1.5, x]
    return x * k.parts[0]


def by_turns(k, x):
    """Longer and shorter."""
    k.parts[:] = [x + i for i in range(1 if len(k.parts) == 2 else 2)]
    return x * len(k.parts)


def asks_which(k, x):
    same = bool(k.parts) and k.parts[0] is k.others[0]
    k.parts[:] = [x + 1]
    k.others[:] = [k.parts[0]]
    return x * (2 if same else 3)


def same(a, b):
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) and a.requires_grad == b.requires_grad if isinstance(a, torch.Tensor) else a == b


def both(device, program, between=lambda k, n: None):
    """Run it as it is and recorded, and compare what each call returns and leaves; what an earlier call has left, too."""
    found = []
    for recording in (False, True):
        k = Keeper(device)
        step = pg.record(lambda x, k=k: program(k, x)) if recording else (lambda x, k=k: program(k, x))
        kept, said = [], []
        for n in range(CALLS):
            between(k, n)
            x = torch.arange(3.0, device=device) + n
            result = step(x)
            kept.append((result, k.held()))  # not copied: nobody may write them
            said.append([result.clone(), *[[v.clone() if isinstance(v, torch.Tensor) else v for v in h] for h in k.held()]])
        found.append((kept, said))
    (_, expected), (kept, said) = found
    for n, (a, b) in enumerate(zip(expected, said, strict=True)):
        assert same(a, b), n
    assert same([[r, *held] for r, held in found[0][0]], [[r, *held] for r, held in kept])
    return pg.stats(step)


@pytest.mark.parametrize("program", RECORDED)
def test_c09_a_list_that_is_filled_anew_is_left_so_by_each_replay(device, program):
    assert both(device, program).replayed >= CALLS - 3


@pytest.mark.parametrize("program", [grows, of_numbers, by_turns, asks_which])
@pytest.mark.filterwarnings("ignore::phonograph.RunsLive")
def test_c09_a_list_that_is_another_in_each_call_or_is_asked_for_what_it_has(device, program):
    both(device, program)


def test_c09_what_stands_there_is_replaced_between(device):
    def between(k, n):
        if n == 3:
            k.parts[0] = k.parts[0] * 5
        if n == 4:
            k.parts[:] = [torch.ones(1, device=device)]
        if n == 5:
            k.parts.clear()
        if n == 6:
            k.parts[1].mul_(7)

    assert both(device, set_at_once, between).replayed >= 3


def test_c09_a_list_put_in_the_place_of_another_is_filled_from_then_on(device):
    def between(k, n):
        if n == 4:
            k.parts = [p * 3 for p in k.parts]

    assert both(device, set_at_once, between).replayed >= 3


def test_c06_c09_losses_in_a_list_of_the_callers_and_a_model_that_lists_its_features(device):
    class Listing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.features = nn.Linear(3, 4), nn.Linear(4, 2), []

        def forward(self, x):
            self.features.clear()
            h = torch.relu(self.a(x))
            self.features.append(h)
            return self.b(h)

    def trained(whole, recording):
        torch.manual_seed(0)
        net, losses = Listing().to(device), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            y = net(x)
            parts = [F.mse_loss(y, torch.zeros_like(y)), net.features[0].square().mean()]
            sum(parts).backward()
            losses.clear()
            losses.extend(parts)
            optimizer.step()
            return y.detach()

        called = pg.record(step) if recording and whole else step
        if recording and not whole:
            pg.record(net)
        found = []
        for n in range(CALLS):
            y = called(torch.arange(6.0, device=device).view(2, 3) + n)
            found.append([y.clone(), *(loss.item() for loss in losses), *(p.detach().clone() for p in net.parameters())])
        return found, pg.stats(called if whole else net) if recording else None

    for whole in (True, False):
        expected, _ = trained(whole, False)
        found, stats = trained(whole, True)
        assert all(map(same, expected, found))
        assert stats.replayed >= CALLS - 3 or not whole


def test_c11_a_list_that_grows_by_several_values_in_each_call_runs_live(device):
    """It would be another in each call: a recording of each would be played never."""
    kept, plain = [], []

    @pg.record
    def step(x):
        kept.extend([x + 1, x + 2])
        return x * 2

    def call(n):
        x = torch.full((3,), float(n), device=device)
        step(x)
        plain.extend([x + 1, x + 2])

    call(0)
    with pytest.warns(pg.RunsLive, match="list that outlives the call"):
        call(1)
    for n in range(2, 6):
        call(n)
    assert all(map(torch.equal, kept, plain))
    assert len(kept) == len(plain)
    assert pg.stats(step).recorded == 0, pg.explain(step)


def bounded():
    kept = deque(maxlen=7)
    return lambda x: (kept.append(x * 2), x + kept[0])[1]


def cut_off():
    kept = []
    return lambda x: (kept.append(x * 2), x + kept[0], kept.pop(0) if len(kept) == 7 else None)[1]


def endless():
    kept = []
    return lambda x: (kept.append(x * 2), x + kept[0])[1]


@may_run_live
@pytest.mark.parametrize("made", [bounded, cut_off, endless])
def test_c09_c15_what_grows_until_it_is_full_is_recorded_then(device, monkeypatch, made):
    """Queues of gradients, of losses, of frames. What grows for ever is not tried again and again."""
    attempts, record = [], making.Maker.record
    monkeypatch.setattr(making.Maker, "record", lambda *args: (attempts.append(1), record(*args))[1])
    monkeypatch.setattr(budget, "_START", 100.0)  # no clock decides here
    live, ours = made(), made()
    recorded = pg.record(ours, keep="always")
    for n in range(80):
        x = ramp(device, 3, start=n)
        assert_same(recorded(x), live(x), f"call {n}")
    if made is endless:
        assert pg.stats(recorded).replayed == 0
        assert len(attempts) <= 3
    else:
        assert pg.stats(recorded).replayed >= 50, reasons(recorded)


def test_c09_a_deque_that_a_call_fills_may_go():
    carried, kept = Carried(), deque([torch.ones(3)])
    carried.learn([Place("kept", kept, CONTENTS, True)])
    assert carried.now()["kept"][0] is kept[0]
    del kept
    assert carried.now() == {"kept": "nothing"}
    carried.stand({"kept": "nothing"})()
