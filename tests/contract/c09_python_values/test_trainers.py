"""C9: classes that train keep books on themselves. What only methods name that did not run in a call is none of its replay's
business, though code that ran has called something else by their names; as soon as they run, it is.
"""

import textwrap

import pytest
import torch

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, ramp

# Each has a `step`, and `between`, which is called between steps.
KEEPING_BOOKS = {
    "train() of its own, and the model's": """
        class Trainer(Base):
            def __init__(self): super().__init__(); self.done, self.history = 0, []
            def step(self, x):
                self.model.train()
                return self.update(x)
            def train(self):
                self.done += 1
                self.history.append(self.done)
            between = train
    """,
    "step() of its own, and the optimizer's": """
        class Trainer(Base):
            def __init__(self): super().__init__(); self.t = 0
            def learn(self, x): return self.update(x)
            def step(self, x):
                self.t += 1
                return self.learn(x)
            def between(self): self.t += 1
        recorded_as = "learn"
    """,
    "what it is called by": """
        class Trainer(Base):
            def __init__(self): super().__init__(); self.calls = 0
            def step(self, x): return self.update(x)
            def __call__(self, x): self.calls += 1
            def between(self): self(None)
    """,
    "state_dict() of its own, and the model's": """
        class Trainer(Base):
            def __init__(self): super().__init__(); self.best = 0.0
            def step(self, x): return self.update(x) + len(self.model.state_dict())
            def state_dict(self): return {"best": self.best}
            def between(self): self.best += self.state_dict()["best"] + 1.0
    """,
    "a property": """
        class Trainer(Base):
            def __init__(self): super().__init__(); self.seen = 0
            def step(self, x): return self.update(x) * made.progress
            @property
            def progress(self): return self.seen / 100
            def between(self): self.seen += self.progress + 1
    """,
    "a global that only another method reads": """
        total = 0
        class Trainer(Base):
            def step(self, x):
                self.model.train()
                return self.update(x)
            def train(self): return total
            def between(self):
                global total
                total += 1
    """,
    "one that is not called now": """
        class Trainer(Base):
            def __init__(self): super().__init__(); self.verbose, self.said = False, 0
            def step(self, x):
                if self.verbose: self.say()
                return self.update(x)
            def say(self): self.said += 1
            def between(self): self.said += 1
    """,
    "a dataclass": """
        import dataclasses
        @dataclasses.dataclass
        class State:
            done: int = 0
            best: float = 9.0
            scale: float = 2.0
        class Trainer(Base):
            def __init__(self): super().__init__(); self.state = State()
            def step(self, x): return self.update(x) * self.state.scale
            def between(self):
                self.state.done += 1
                self.state.best = 1.0 / self.state.done
    """,
    "a parser's arguments": """
        import argparse
        class Trainer(Base):
            def __init__(self): super().__init__(); self.args = argparse.Namespace(scale=2.0, global_step=0)
            def step(self, x): return self.update(x) * self.args.scale
            def between(self): self.args.global_step += 1
    """,
    "a number with the name of what is called": """
        class Trainer(Base):
            def __init__(self): super().__init__(); self.step = self.backward = 0
            def learn(self, x): return self.update(x)
            def between(self):
                self.step += 1
                self.backward += 2
        recorded_as = "learn"
    """,
    "a constructor": """
        class Noted:
            def __init__(self, n): self.n, self.now = n, made.now
            now = 0
        class Trainer(Base):
            def __init__(self): super().__init__(); self.kind = Noted; self.now = 0
            def step(self, x): return self.update(x) if self.kind is Noted else x
            def between(self): self.now += 1
    """,
}

BASE = """
class Made: progress, now = 2.0, 0
made = Made()
class Base:
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 3).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
    def update(self, x):
        self.optimizer.zero_grad()
        loss = self.model(x).square().sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()
"""


def trainer(source, device):
    space = {"torch": torch, "device": device, "__name__": "a_trainer"}
    exec(compile(BASE + textwrap.dedent(source), "/users/trainer.py", "exec"), space)
    return space["Trainer"](), space.get("recorded_as", "step")


@may_run_live
@pytest.mark.parametrize("source", KEEPING_BOOKS.values(), ids=KEEPING_BOOKS)
def test_c09_what_methods_name_that_do_not_run(device, source):
    (ours, name), (live, _) = trainer(source, device), trainer(source, device)
    recorded = pg.record(getattr(ours, name))
    for n in range(12):
        assert_same(recorded(ramp(device, 3, start=n)), getattr(live, name)(ramp(device, 3, start=n)))
        ours.between()
        live.between()
    assert counts(recorded) == (1, 1, 11), pg.explain(recorded)


# How a step reads of `state`, a dataclass or a parser's arguments, what nothing names.
READING_ALL = {
    "fields": ("dataclass", "[getattr(self.state, field.name) for field in dataclasses.fields(self.state)][0]"),
    "asdict": ("dataclass", "dataclasses.asdict(self.state)['sca' + 'le']"),
    "astuple": ("dataclass", "dataclasses.astuple(self.state)[0]"),
    "its fields' names": ("dataclass", "getattr(self.state, [*self.state.__dataclass_fields__][0])"),
    "replace": ("dataclass", "made_of(dataclasses.replace(self.state))"),
    "comparison": ("dataclass", "(2.0 if self.state == State() else 3.0)"),
    "repr": ("dataclass", "float(repr(self.state)[12:15])"),
    "a match": ("dataclass", "matched(self.state)"),
    "hash": ("dataclass", "(2.0 if hash(self.state) == hash(State()) else 3.0)"),
    "order": ("dataclass", "(3.0 if self.state > State() else 2.0)"),
    "vars": ("arguments", "vars(self.state)['sca' + 'le']"),
    "a comparison of arguments": ("arguments", "(2.0 if self.state == argparse.Namespace(scale=2.0) else 3.0)"),
    "a look-up": ("arguments", "(2.0 if 'scale' in self.state else 3.0)"),
    "a repr of arguments": ("arguments", "float(repr(self.state)[16:19])"),
}


@may_run_live
@pytest.mark.parametrize(("kind", "read"), READING_ALL.values(), ids=READING_ALL)
def test_c09_all_that_an_object_has_at_once(device, kind, read):
    source = f"""
        import argparse, dataclasses
        @dataclasses.dataclass(order=True, unsafe_hash=True)
        class State:
            scale: float = 2.0
        def made_of(state): return float(repr(state)[12:15])
        def matched(state):
            match state:
                case State(a): return a
        class Trainer(Base):
            def __init__(self):
                super().__init__()
                self.state = State() if "{kind}" == "dataclass" else argparse.Namespace(scale=2.0)
            def step(self, x): return self.update(x) * {read}
            def change(self):
                if "{read}".startswith("(2.0 if 'scale'"): del self.state.scale
                else: self.state.scale = 3.0
    """
    (ours, _), (live, _) = trainer(source, device), trainer(source, device)
    recorded = pg.record(ours.step)
    for n in range(8):
        if n == 4:
            ours.change()
            live.change()
        assert_same(recorded(ramp(device, 3, start=n)), live.step(ramp(device, 3, start=n)))
    assert counts(recorded)[2] >= 4, pg.explain(recorded)


@may_run_live
def test_c09_a_method_that_runs_later_counts_from_then_on(device):
    """What it reads is no number, which would be followed."""
    source = """
        class Trainer(Base):
            def __init__(self): super().__init__(); self.warm, self.scale = False, "2"
            def step(self, x): return self.update(x) * (self.scaled() if self.warm else 1.0)
            def scaled(self): return float(self.scale)
    """
    (ours, _), (live, _) = trainer(source, device), trainer(source, device)
    recorded = pg.record(ours.step)
    for warm, scale in [(False, 2), (False, 3), (True, 3), (True, 4), (False, 5), (True, 4), (True, 5)]:
        for one in (ours, live):
            one.warm, one.scale = warm, str(scale)
        for n in range(3):
            assert_same(recorded(ramp(device, 3, start=n)), live.step(ramp(device, 3, start=n)))
    assert counts(recorded)[1] == 4  # cold; warm with 3, 4 and 5


@may_run_live
def test_c09_what_a_backward_runs_counts(device):
    """Of a model that is recorded in place, methods run in the backward as well: as hooks, or where a part is recomputed."""

    class Helper:
        def __init__(self):
            self.factor = 1.0

        def hook(self, grad):
            return grad * self.factor

    class Part(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale, self.slope, self.helper = torch.nn.Linear(3, 3), 2.0, 1.0, Helper()

        def forward(self, x):
            y = torch.utils.checkpoint.checkpoint(self.scaled, x, use_reentrant=False)
            y.register_hook(self.sloping)
            y.register_hook(self.helper.hook)
            return y * 1.0

        def scaled(self, x):
            return self.inner(x) * self.scale

        def sloping(self, grad):
            return grad * self.slope

    def made():
        torch.manual_seed(0)
        return Part().to(device)

    ours, live = pg.record(made()), made()

    def gradient(model):
        model.zero_grad()
        model(ramp(device, 3)).sum().backward()
        return model.inner.weight.grad.clone()

    for scale, slope, factor in [(2.0, 1.0, 1.0), (3.0, 1.0, 1.0), (3.0, 2.0, 1.0), (3.0, 2.0, 3.0), (2.0, 1.0, 1.0)]:
        for one in (ours, live):
            one.scale, one.slope, one.helper.factor = scale, slope, factor
        for _ in range(4):
            assert_same(gradient(ours), gradient(live))
    assert pg.stats(ours).replayed > 0, pg.explain(ours)
    pg.reset(ours)  # its graphs have hooks that are bound to it: docs/limits.md
