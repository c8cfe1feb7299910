"""C1, C5, C9: a call keeps its metrics in an attribute, numbers that it has counted beside tensors, and may return the same
container. Each replay leaves a new one there, whoever holds or changes those of earlier calls."""

import textwrap
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp, reasons

BASE = """
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
@dataclass
class Metrics:
    n: int
    loss: object
    history: object = None
Row = namedtuple("Row", "n loss")
class Made(Trainer):
    def step(self, x):
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.n += 1
"""

KEPT = {
    "a number and a tensor": "self.last = {'n': self.n, 'loss': loss}",
    "and returned": "self.last = {'n': self.n, 'loss': loss}; return self.last",
    "without a number, and returned": "self.last = {'loss': loss}; return self.last",
    "a number alone": "self.last = {'n': self.n}",
    "a tuple": "self.last = (self.n, loss)",
    "filled after it is made": "self.last = {}; self.last['n'] = self.n; self.last['loss'] = loss",
    "filled before it is kept": "d = dict(n=self.n); d['loss'] = loss; self.last = d; d['again'] = self.n * 2",
    "in each other": "self.last = {'a': {'n': self.n, 'losses': [loss, self.n / 2]}, 'of': OrderedDict(n=-self.n)}",
    "a number read of a tensor": "self.last = {'n': self.n, 'loss': loss.item()}; return self.last",
    "read again": "self.last = {'n': self.n, 'loss': loss.detach()}; return self.last['loss'] + self.last['n']",
    "in two places": "self.last = self.best = {'n': self.n, 'loss': loss}; return [self.last, (self.best,)]",
    "twice in one": "d = [self.n, loss.item()]; self.last = {'a': d, 'b': (d, d)}; return d",
    "a tuple in two places": "self.last = (self.n, loss); return self.last, self.last",
    "words and shapes": "self.last = {'phase': 'train', 'n': self.n, 'none': None, 'dtype': x.dtype, 'loss': loss}",
    "the argument": "self.last = {'x': x, 'n': self.n}; return self.last",
    "views": "y = self.model(x).detach(); self.last = {'y': y, 'row': y[0], 'n': self.n}; return self.last",
    "a data class": "self.last = Metrics(self.n, loss); return self.last",
    "a named tuple": "self.last = Row(self.n, loss.item())",
    "an object": "self.last = SimpleNamespace(n=self.n, loss=loss); return self.last",
    "appended, and returned": "d = {'n': self.n, 'loss': loss.item()}; self.history.append(d); return d",
    "appended, and kept": "self.last = {'n': self.n, 'loss': loss.detach()}; self.history.append(self.last)",
    "in a deque": "d = {'n': self.n, 'loss': loss.detach()}; self.recent.append(d); return d",
}

READ = {
    "what was there": "old = self.last; self.last = {'n': self.n, 'loss': loss.detach()}; return loss + (old or {'n': 1})['n']",
    "by getattr": "old = getattr(self, 'la' + 'st'); self.last = {'n': self.n}; return loss + (old or {'n': 1})['n']",
    "by its dictionary": "old = vars(self)['last']; self.last = {'n': self.n}; return loss + (old or {'n': 1})['n']",
    "by a method": "old = self.latest(); self.last = {'n': self.n}; return loss + (old or {'n': 1})['n']",
    "one in the other": "self.last = {'n': self.n, 'before': self.last} if self.n % 3 else {'n': self.n}; return loss",
    "every third call": "self.last = {'n': self.n, 'loss': loss}\nif self.n % 3 == 0: self.history.append(dict(self.last))",
    "something of the caller's in it": "self.last = {'n': self.n, 'settings': self.settings}",
    "itself": "self.last = {'n': self.n}; self.last['me'] = self.last",
    "its owner": "self.last = {'n': self.n, 'me': self}",
}


class Trainer:
    def __init__(self, device):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.n, self.last, self.best, self.history, self.recent = 0, None, None, [], deque(maxlen=3)
        self.settings = {"a": 1}

    def latest(self):
        return self.last


def trainer(body, device):
    space = {"Trainer": Trainer, "__name__": "kept_by_the_test"}
    exec(compile(BASE + textwrap.indent(body, " " * 8), "/users/kept.py", "exec"), space)
    return space["Made"](device)


def told(tree, met=None):
    """What is in a tree, each tensor by its number, and which of its containers are one."""
    met = {} if met is None else met
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone(), tree.requires_grad
    if not (isinstance(tree, (dict, list, tuple, deque, SimpleNamespace)) or hasattr(tree, "__dict__")):
        return type(tree).__name__, tree
    if id(tree) in met:
        return "again", met[id(tree)]
    met[id(tree)] = len(met)
    if isinstance(tree, nn.Module | torch.optim.Optimizer | Trainer):
        return "an object"
    values = tree if isinstance(tree, (dict, list, tuple, deque)) else vars(tree)
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    return type(tree).__name__, [(key, told(value, met)) for key, value in pairs]


def played(body, device, wrap, between):
    made = trainer(body, device)
    step, seen, held = wrap(made.step), [], []
    for n in range(12):
        result = step(ramp(device, 4, 3, start=n))
        held.append((result, made.last))  # of all calls
        seen.append(told([result, made.last, made.best, made.history, made.recent, made.n, made.model.weight]))
        between(made, n)
    return [*seen, told(held)], step


def nothing(made, n):
    pass


def poked(made, n):
    if n % 4 == 2 and isinstance(made.last, dict):
        made.last["poked"] = n


def taken(made, n):
    if n % 4 == 2:
        made.last = None


@may_run_live
@pytest.mark.parametrize("between", [nothing, poked, taken])
@pytest.mark.parametrize("body", KEPT.values(), ids=KEPT)
def test_c09_metrics_that_are_kept_are_left_by_each_replay(device, body, between):
    found, recorded = played(body, device, lambda step: pg.record(step, keep="always"), between)
    expected, _ = played(body, device, lambda step: step, between)
    assert_same(found, expected)
    assert pg.stats(recorded).replayed >= 8, pg.explain(recorded)


@may_run_live
@pytest.mark.parametrize("between", [nothing, poked, taken])
@pytest.mark.parametrize("body", READ.values(), ids=READ)
def test_c09_metrics_that_are_read_or_cannot_be_made_anew(device, body, between):
    found, _ = played(body, device, lambda step: pg.record(step, keep="always"), between)
    expected, _ = played(body, device, lambda step: step, between)
    assert_same(found, expected)


@may_run_live
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("self.last = {'n': self.n, 'settings': self.settings}", "keeps a container in self.last that is found elsewhere"),
        (READ["what was there"], "changes self.last"),
    ],
)
def test_c11_what_stands_in_the_way_is_named_and_not_what_is_followed(device, body, reason):
    _, recorded = played(body, device, lambda step: pg.record(step, keep="always"), nothing)
    assert reason in reasons(recorded)
    assert "changes self.n" not in reasons(recorded)


@may_run_live
def test_c11_a_number_of_a_call_whose_backward_runs_outside(device):
    """It would be followed, if the backward ran within the call."""

    class Made(Trainer):
        def step(self, x):
            self.n += 1
            self.last = {"n": self.n}
            return self.model(x).square().mean()

    made = Made(device)
    recorded = pg.record(made.step, keep="always")
    for n in range(4):
        recorded(ramp(device, 4, 3, start=n)).backward()
    assert made.last == {"n": 4}
    assert "run backward inside the recorded function" in reasons(recorded)
