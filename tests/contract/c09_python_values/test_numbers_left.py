"""C9: numbers that a call leaves in attributes are left by each replay."""

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.left import made
from tests.helpers import counts, may_run_live, ramp

# Each has a class `Made` with a method `step`.
COUNTED = {
    "once": """
        class Made(Base):
            def step(self, x):
                self.n += 1
                return x * 2
    """,
    "down, and at the end": """
        class Made(Base):
            def step(self, x):
                y = x * 2
                self.n -= 3
                return y
    """,
    "in a loop": """
        class Made(Base):
            def step(self, x):
                for _ in range(3):
                    x = x * 2
                    self.n += 2
                return x
    """,
    "in a method, and an inner function": """
        class Made(Base):
            def step(self, x):
                def inner(): self.n += 1
                inner()
                self.count()
                return x * 2
            def count(self): self.n += 1
    """,
    "on another object": """
        class Counter:
            def __init__(self): self.n = 0
        class Made(Base):
            def __init__(self): super().__init__(); self.other = Counter()
            def step(self, x):
                self.other.n += 1
                return x * 2
        def number(made): return made.other.n
    """,
    "on one of two objects": """
        class Made(Base):
            def __init__(self): super().__init__(); self.others = [Base(), Base()]
            def step(self, x):
                self.others[1].n += 1
                return x * 2
        def number(made): return (made.others[0].n, made.others[1].n)
    """,
    "two numbers": """
        class Made(Base):
            def __init__(self): super().__init__(); self.m = 7
            def step(self, x):
                self.n += 1
                self.m += 2
                return x * 2
        def number(made): return made.n, made.m
    """,
    "beside a method of the same name": """
        class Tool:
            def n(self): return 2
        class Made(Base):
            def __init__(self): super().__init__(); self.tool = Tool()
            def step(self, x):
                self.n += 1
                return x * self.tool.n()
    """,
    "and read by what does not run": """
        class Made(Base):
            def step(self, x):
                self.n += 1
                return self.other(x) if self.flag else x * 2
            def other(self, x): return x * self.n
    """,
    "a module": """
        class Made(Base, torch.nn.Module):
            def __init__(self): torch.nn.Module.__init__(self); Base.__init__(self)
            def step(self, x):
                self.n += 1
                return x * 2
    """,
    "nothing in the end": """
        class Made(Base):
            def step(self, x):
                self.n += 1
                self.n -= 1
                return x * 2
    """,
    "of a dataclass": """
        import dataclasses
        @dataclasses.dataclass
        class State:
            n: int = 0
            scale: float = 2.0
        class Made(Base):
            def __init__(self): super().__init__(); self.state = State()
            def step(self, x):
                self.state.n += 1
                return x * self.state.scale
        def number(made): return made.state.n
    """,
    "a huge number": """
        class Made(Base):
            def __init__(self): super().__init__(); self.n = 10 ** 30
            def step(self, x):
                self.n += 1000
                return x * 2
    """,
}


READ = {
    "as a factor": "return x * self.n",
    "as a condition": "return x * 2 if self.n % 3 else x * 3",
    "by itself": "return x * 2 if self.n else x * 3",
    "before": "old = self.n; self.n += 1; return x * old",
    "by getattr": "return x * getattr(self, 'n')",
    "by a made name": "return x * getattr(self, chr(110))",
    "by vars": "return x * vars(self)['n']",
    "by its dictionary": "return x * self.__dict__['n']",
    "by an attrgetter": "return x * operator.attrgetter('n')(self)",
    "by an attrgetter from before": "return x * get(self)",
    "in a format": "return x * float(f'{self.n}')",
    "in a format of an attribute": "return x * float('{0.n}'.format(self))",
    "by another name": "me = self; return x * me.n",
    "by a method": "return x * self.read()",
    "by a property": "return x * self.prop",
    "by an inner function": "return (lambda: x * self.n)()",
    "by a comprehension": "return x * sum([self.n for _ in range(2)])",
    "in a match": "\n        match self:\n            case Base(n=k): return x * k",
    "by an eval": "return x * eval('self.n')",
    "by super": "return x * super().value()",
    "in a hook": "w = x.detach().requires_grad_(); y = w * 1.0; y.register_hook(self.hook);"
    " return torch.autograd.grad(y.sum(), w)[0]",
    "to add it to itself": "self.n += self.n; return x * 2",
    "to multiply it": "self.n *= 2; return x * 2",
    "as an argument": "return self.times(x, self.n)",
    "by a partial": "return part(self)(x)",
    "by a constructor": "return x * Copy(self).n",
}


READING = """
get = operator.attrgetter("n")
class Copy:
    def __init__(self, of): self.n = of.n
def times(self, x): return x * self.n
def part(self): return functools.partial(times, self)
class Value(Base):
    def value(self): return self.n
class Made(Value):
    def step(self, x):
        self.n += 1
        {}
    def read(self): return self.n
    def hook(self, grad): return grad * self.n
    def times(self, x, n): return x * n
    @property
    def prop(self): return self.n
"""


OTHERWISE = {
    "by a float": "self.n += 1.5; return x * 2",
    "by a variable": "self.n += self.flag + 1; return x * 2",
    "with what is not in place": "self.n = self.n + 1; return x * 2",
    "with setattr": "setattr(self, 'n', self.n + 1); return x * 2",
    "and another thing": "self.n += 1; self.last = 'x'; return x * 2",
    "and a new thing": "self.n += 1; self.fresh = self.n; return x * 2",
}


@may_run_live
@pytest.mark.parametrize("source", COUNTED.values(), ids=COUNTED)
def test_c09_a_number_that_is_only_counted(device, source):
    (ours, number), (live, _) = made(source), made(source)
    recorded = pg.record(ours.step)
    for n in range(10):
        assert_same(recorded(ramp(device, 3, start=n)), live.step(ramp(device, 3, start=n)))
        assert number(ours) == number(live)
        if n == 6:
            ours.n = live.n = 100  # whatever it is
    assert counts(recorded) == (1, 1, 9), pg.explain(recorded)


@may_run_live
@pytest.mark.parametrize("read", [*READ.values(), *OTHERWISE.values()], ids=[*READ, *OTHERWISE])
def test_c09_a_number_that_is_more_than_counted(device, read):
    (ours, _), (live, _) = made(READING.format(read)), made(READING.format(read))
    recorded = pg.record(ours.step)
    for n in range(8):
        assert_same(recorded(ramp(device, 3, start=n)), live.step(ramp(device, 3, start=n)))
        assert vars(ours) == vars(live)


@may_run_live
def test_c09_what_is_counted_becomes_something_else(device):
    source = COUNTED["once"]
    (ours, _), (live, _) = made(source), made(source)
    recorded = pg.record(ours.step)
    for value in (0, 2.5, True, 7):
        ours.n = live.n = value
        for n in range(3):
            assert_same(recorded(ramp(device, 3, start=n)), live.step(ramp(device, 3, start=n)))
            assert (ours.n, type(ours.n)) == (live.n, type(live.n))
    del ours.n
    with pytest.raises(AttributeError):
        recorded(ramp(device, 3))
    assert not hasattr(ours, "n")


@may_run_live
def test_c09_what_is_counted_is_read_in_another_branch(device):
    source = COUNTED["and read by what does not run"]
    (ours, _), (live, _) = made(source), made(source)
    recorded = pg.record(ours.step)
    for n in range(12):
        ours.flag = live.flag = n % 4 == 3
        assert_same(recorded(ramp(device, 3, start=n)), live.step(ramp(device, 3, start=n)))
        assert ours.n == live.n
    assert counts(recorded)[2] > 0, pg.explain(recorded)


@may_run_live
def test_c09_what_is_counted_is_read_by_a_generator_from_before(device):
    """It goes on where it was: where functions are heard by their starts, it is not."""
    source = """
        import weakref
        class Made(Base):
            def __init__(self):
                super().__init__()
                running = self.numbers()
                next(running)
                self.following = weakref.finalize(self, running.send)  # which hides it
                self.following.atexit = False
            def numbers(self):
                while True: yield self.n
            def step(self, x):
                self.n += 1
                return x * self.following.peek()[1](None)
    """
    (ours, _), (live, _) = made(source), made(source)
    recorded = pg.record(ours.step)
    for n in range(6):
        assert_same(recorded(ramp(device, 3, start=n)), live.step(ramp(device, 3, start=n)))
        assert ours.n == live.n


@may_run_live
def test_c09_a_class_that_sets_attributes_its_own_way(device):
    source = """
        class Made(Base):
            def __setattr__(self, name, value): super().__setattr__(name, value * 2)
            def step(self, x):
                self.n += 1
                return x * 2
    """
    (ours, _), (live, _) = made(source), made(source)
    recorded = pg.record(ours.step)
    for n in range(6):
        assert_same(recorded(ramp(device, 3, start=n)), live.step(ramp(device, 3, start=n)))
        assert ours.n == live.n


@may_run_live
def test_c09_a_model_that_counts_its_calls(device):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(3, 3), 0

        def forward(self, x):
            self.calls += 1
            return self.linear(x)

    def trained(wrap):
        torch.manual_seed(0)
        net = Net().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        called, losses = wrap(net), []
        for n in range(8):
            optimizer.zero_grad()
            loss = called(ramp(device, 2, 3, start=n)).square().sum() + called(ramp(device, 2, 3)).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
        return losses, net.calls, net

    ours, live = trained(pg.record), trained(lambda net: net)
    assert_same(ours[0], live[0])
    assert ours[1] == live[1] == 16
    assert pg.stats(ours[2]).replayed > 8, pg.explain(ours[2])


@may_run_live
def test_c09_a_replay_that_raises_has_not_counted(device):
    """An operator that finds its index out of range raises at once on the CPU: what follows in the code does not happen."""
    source = """
        class Made(Base):
            def step(self, x, at):
                y = x.index_select(0, at)
                self.n += 1
                return y
    """
    (ours, _), (live, _) = made(source), made(source)
    recorded, x = pg.record(ours.step), ramp(device, 4)
    for n in range(5):
        at = torch.tensor([n % 4], device=device)
        assert_same(recorded(x, at), live.step(x, at))
    if device.type == "cpu":
        for step in (recorded, live.step):
            with pytest.raises(IndexError):
                step(x, torch.tensor([9]))
        assert ours.n == live.n == 5
    at = torch.tensor([1], device=device)
    assert_same(recorded(x, at), live.step(x, at))
    assert ours.n == live.n


@may_run_live
def test_c09_counting_and_verifying(device):
    (ours, _), (live, _) = made(COUNTED["once"]), made(COUNTED["once"])
    recorded = pg.record(ours.step, verify=2)
    for n in range(6):
        assert_same(recorded(ramp(device, 3, start=n)), live.step(ramp(device, 3, start=n)))
        assert ours.n == live.n
    assert any("counts self.n" in reason for reason in pg.stats(recorded).refusals)


@may_run_live
def test_c09_counting_beside_a_live_part(device):
    """A marked function sees the number as it is by then."""
    seen = {"ours": [], "live": []}

    class Made:
        def __init__(self, name):
            self.n, self.name = 0, name

        @pg.live
        def tell(self):
            seen[self.name].append(self.n)

        def step(self, x):
            y = x * 2
            self.tell()
            y = y + 1
            self.n += 1
            self.tell()
            return y

    ours, live = Made("ours"), Made("live")
    recorded = pg.record(ours.step, fallback="split")
    for n in range(6):
        assert_same(recorded(ramp(device, 3, start=n)), live.step(ramp(device, 3, start=n)))
        assert ours.n == live.n
    assert seen["ours"] == seen["live"]


@may_run_live
def test_c19_what_is_counted_is_told(device):
    ours, _ = made(COUNTED["once"])
    recorded = pg.record(ours.step)
    for n in range(4):
        recorded(ramp(device, 3, start=n))
    assert "sets self.n" in pg.explain(recorded)
