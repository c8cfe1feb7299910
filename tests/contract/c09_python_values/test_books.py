"""C9: ordinary loops that keep books: counters, logs, histories and attributes that grow, on the trainer, the model and
in globals. None of them needs a recording in each call, or runs live for it. As users write them: the loss may raise, and
books are kept before.
"""

import textwrap

import pytest
import torch

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, ramp

# Each is the body of a class: a `step`, what is done `between`; and how many recordings twelve calls make, how many run live.
BOOKS = {
    "a counter": (1, 1, """
        n = 0
        def step(self, x, y): self.n += 1; return self.update(x, y)
    """),
    "a table of counters": (1, 1, """
        def prepare(self): self.stats = {"steps": 0, "samples": 0}
        def step(self, x, y): self.stats["steps"] += 1; self.stats["samples"] += x.shape[0]; return self.update(x, y)
    """),
    "a counter of a kind": (1, 1, """
        def prepare(self): self.stats = collections.Counter()
        def step(self, x, y): self.stats["steps"] += 1; return self.update(x, y)
    """),
    "a counter in the model": (1, 1, """
        def prepare(self): self.model.seen = 0
        def step(self, x, y): self.model.seen += 1; return self.update(x, y)
    """),
    "a global counter": (1, 1, """
        def step(self, x, y):
            global done
            done += 1
            return self.update(x, y)
    """),
    "an epoch, worked out": (1, 1, """
        n, epoch = 0, 0.0
        def step(self, x, y): self.n += 1; self.epoch = self.n / 5; return self.update(x, y)
    """),
    "the last loss": (1, 1, """
        last = None
        def step(self, x, y): self.last = loss = self.update(x, y); return loss
    """),
    "the least loss": (1, 1, """
        def prepare(self): self.best = torch.tensor(9.0, device=device)
        def step(self, x, y): loss = self.update(x, y); self.best = torch.minimum(self.best, loss); return loss
    """),
    "a running mean": (1, 1, """
        def prepare(self): self.mean = torch.zeros((), device=device)
        def step(self, x, y): loss = self.update(x, y); self.mean = 0.9 * self.mean + 0.1 * loss; return loss
    """),
    "a history": (1, 1, """
        n = 0
        def prepare(self): self.history = {"loss": [], "step": []}
        def step(self, x, y):
            loss = self.update(x, y)
            self.history["loss"].append(loss)
            self.history["step"].append(self.n)
            self.n += 1
            return loss
    """),
    "callbacks with a history": (1, 1, """
        def prepare(self): self.seen, self.callbacks = [], [self.note]
        def note(self, loss): self.seen.append(loss)
        def step(self, x, y):
            loss = self.update(x, y)
            for call in self.callbacks: call(loss)
            return loss
    """),
    "a bounded history": (1, 1, """
        def prepare(self): self.recent = collections.deque(maxlen=3)
        def step(self, x, y): loss = self.update(x, y); self.recent.append(loss); return loss
    """),
    "a log of each fifth step": (2, 2, """
        n = 0
        def prepare(self): self.log = []
        def step(self, x, y):
            loss = self.update(x, y)
            if self.n % 5 == 0: self.log.append(loss.item())
            self.n += 1
            return loss
    """),
    "a log that each epoch begins anew": (2, 2, """
        n = 0
        def prepare(self): self.log = []
        def step(self, x, y):
            loss = self.update(x, y)
            if self.n % 5 == 0: self.log.append(loss.item())
            self.n += 1
            return loss
        def between(self):
            if self.n % 3 == 0: self.log = []
    """),
    "notes by step": (1, 3, """
        n = 0
        def prepare(self): self.notes = {}
        def step(self, x, y):
            loss = self.update(x, y)
            if self.n % 5 == 0: self.notes[self.n] = loss.item()
            self.n += 1
            return loss
    """),
    "a mean of the weights each fourth step": (2, 2, """
        n = 0
        def prepare(self): self.mean = [torch.zeros_like(p) for p in self.model.parameters()]
        def step(self, x, y):
            loss = self.update(x, y)
            self.n += 1
            if self.n % 4 == 0:
                with torch.no_grad():
                    for mean, p in zip(self.mean, self.model.parameters()): mean.lerp_(p, 0.5)
            return loss
    """),
    "a count that decides, and the last loss": (2, 2, """
        n, last = 0, None
        def step(self, x, y):
            self.n += 1
            self.last = loss = self.update(x, y)
            return loss * 2 if self.n % 4 == 0 else loss
    """),
    "a coefficient, a history and the least loss": (1, 1, """
        def prepare(self): self.beta, self.best, self.log = 0.0, torch.tensor(9.0, device=device), []
        def step(self, x, y):
            self.beta = self.beta + 0.125
            loss = self.update(x, y, self.beta)
            self.best = torch.minimum(self.best, loss)
            self.log.append(loss)
            return loss
    """),
    "metrics: a loss, a count": (1, 1, """
        n = 0
        def prepare(self): self.metrics = {"loss": None, "steps": 0}
        def step(self, x, y):
            loss = self.update(x, y)
            self.n += 1
            self.metrics["loss"], self.metrics["steps"] = loss, self.n
            return loss
    """),
    "a warm-up of the loss": (2, 2, """
        n = 0
        def weight(self): return self.n / 4 if self.n < 4 else 1.0
        def step(self, x, y): self.n += 1; return self.update(x, y, self.weight())
    """),
    "a context that sets what it decides": (3, 2, """
        n, last = 0, False
        @contextlib.contextmanager
        def counted(self):
            self.n += 1
            self.last = self.n % 4 == 0
            yield
        def step(self, x, y):
            with self.counted():
                loss = self.update(x, y)
                if self.last: loss = loss * 2
            return loss
    """),
    "what is kept outside": (1, 1, """
        def prepare(self): self.log, self.best, self.n = [], 9.0, 0
        def step(self, x, y): return self.update(x, y)
        def between(self): self.n += 1; self.log.append(self.n); self.best = min(self.best, 1 / self.n); self.extra = self.n
    """),
    "a model that keeps books": (1, 1, """
        def prepare(self):
            class Noting(torch.nn.Module):
                def __init__(self, inner): super().__init__(); self.inner, self.calls, self.seen = inner, 0, []
                def forward(self, x): self.calls += 1; y = self.inner(x); self.seen.append(y.detach().mean()); return y
            self.model = Noting(self.model)
        def step(self, x, y): return self.update(x, y)
    """),
}  # fmt: skip

BASE = """
import collections, contextlib
done = 0
class Base:
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 3).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.prepare()
    def prepare(self): pass
    def between(self): pass
    def update(self, x, y, weight=1.0):
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(x), y) * weight
        loss.backward()
        self.optimizer.step()
        return loss.detach()
"""


def trainer(source, device):
    space = {"torch": torch, "device": device, "__name__": "a_trainer"}
    body = f"class Trainer(Base):\n{textwrap.indent(textwrap.dedent(source), '    ')}"
    exec(compile(BASE + body, "/users/trainer.py", "exec"), space)
    return space["Trainer"](), space


def books(of, space):
    own = {name: value for name, value in vars(of).items() if name not in ("model", "optimizer", "callbacks")}
    return own, space["done"], {n: v for n, v in vars(of.model).items() if n in ("seen", "calls")}


@may_run_live
@pytest.mark.parametrize(("recordings", "live", "source"), BOOKS.values(), ids=BOOKS)
def test_c09_books_that_a_loop_keeps(device, recordings, live, source):
    (ours, own), (theirs, other) = trainer(source, device), trainer(source, device)
    recorded = pg.record(ours.step, keep="always")
    for n in range(12):
        x, y = ramp(device, 2, 3, start=n) / 7, torch.tensor([n % 3, 1], device=device)
        assert_same(recorded(x, y), theirs.step(x, y), f"call {n}")
        assert_same(books(ours, own), books(theirs, other), f"call {n}")
        ours.between()
        theirs.between()
    assert_same(ours.model.state_dict(), theirs.model.state_dict())
    assert counts(recorded)[:2] == (live, recordings), pg.explain(recorded)


def test_c09_books_on_a_recorded_layer(device):
    """Of a module of torch's own class, only those attributes count that code which ran names: they are noticed."""

    def made():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LeakyReLU(0.5)).to(device)
        model.log, model.best, model.steps = [], 9.0, 0
        return model

    ours, theirs = pg.record(made(), keep="always"), made()
    for n in range(12):
        for model in (ours, theirs):
            model.steps += 1
            model.log.append(n)
            model.best = min(model.best, 1 / (n + 1))
            model[1].negative_slope = 0.5 if n < 8 else 0.25
        x = ramp(device, 2, 3, start=n) - 3
        assert_same(ours(x), theirs(x), f"call {n}")
    assert counts(ours)[1:] == (2, 10), pg.explain(ours)
    pg.reset(ours)
