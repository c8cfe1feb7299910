"""C9: a loop counts, logs, appends and grows attributes beside what its step reads, and nothing is recorded anew; what the step
does read is noticed when it changes. Each loop says how its step reads a factor, and what happens between steps."""

import sys
import textwrap

import pytest
from torch import nn

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp, reasons

STEPS = 24

COMMON = """
import argparse, collections, copy, dataclasses, functools, logging, operator, types
import torch
from torch import nn

class Base:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
    def update(self, x, factor=1.0):
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean() * factor
        loss.backward()
        self.optimizer.step()
        return loss.detach()
"""


def assert_noticed(mine, plain, x):
    """What `change` changes, the step reads."""
    step = pg.record(mine.step)
    for _ in range(6):
        assert_same(step(x), plain.step(x))
    assert pg.stats(step).replayed >= 3, pg.explain(step)
    mine.change()
    plain.change()
    for _ in range(3):
        assert_same(step(x), plain.step(x))


def assert_set_again(mine, x):
    """What `change` changes, the step sets to what it was; `now` gives it."""
    before, step = mine.now(), pg.record(mine.step)
    for _ in range(6):
        step(x)
    assert pg.stats(step).replayed >= 3, pg.explain(step)
    for _ in range(3):
        mine.change()
        assert mine.now() != before
        step(x)
        assert mine.now() == before


# A `Trainer` with a `step`; `between(n)`, which changes nothing that the step reads; and `change()`, which does.
LOOPS = {
    "a dictionary that grows beside the key that is read": """
        class Trainer(Base):
            def __init__(self): super().__init__(); self.config = {"factor": 2.0}
            def step(self, x): return self.update(x, self.config["factor"])
            def between(self, n): self.config[f"seen {n}"] = n
            def change(self): self.config["factor"] = 3.0
    """,
    "a dictionary that is asked with a default": """
        class Trainer(Base):
            def __init__(self): super().__init__(); self.config = {"done": 0}
            def step(self, x): return self.update(x, self.config.get("factor", 2.0))
            def between(self, n): self.config["done"] += 1
            def change(self): self.config["factor"] = 3.0
    """,
    "a dictionary that is asked for a key": """
        class Trainer(Base):
            def __init__(self): super().__init__(); self.config = {"done": 0}
            def step(self, x): return self.update(x, self.config["factor"] if "factor" in self.config else 2.0)
            def between(self, n): self.config["done"] += 1
            def change(self): self.config["factor"] = 3.0
    """,
    "a dictionary in a dictionary": """
        class Trainer(Base):
            def __init__(self): super().__init__(); self.config = {"loss": {"factor": 2.0}, "log": []}
            def step(self, x): return self.update(x, self.config["loss"]["factor"])
            def between(self, n): self.config["log"].append(n)
            def change(self): self.config["loss"]["factor"] = 3.0
    """,
    "a global dictionary": """
        CONFIG = {"factor": 2.0}
        class Trainer(Base):
            def step(self, x): return self.update(x, CONFIG["factor"])
            def between(self, n): CONFIG[n] = n
            def change(self): CONFIG["factor"] = 3.0
    """,
    "a dictionary of a closure": """
        def made():
            config = {"factor": 2.0, "done": 0}
            class Trainer(Base):
                def step(self, x): return self.update(x, config["factor"])
                def between(self, n): config["done"] += 1
                def change(self): config["factor"] = 3.0
            return Trainer
        Trainer = made()
    """,
    "parsed arguments": """
        class Trainer(Base):
            def __init__(self): super().__init__(); self.args = argparse.Namespace(factor=2.0, step=0)
            def step(self, x): return self.update(x, self.args.factor)
            def between(self, n): self.args.step += 1; setattr(self.args, f"metric{n}", n)
            def change(self): self.args.factor = 3.0
    """,
    "a dataclass": """
        @dataclasses.dataclass
        class State:
            step: int = 0
            factor: float = 2.0
            log: list = dataclasses.field(default_factory=list)
        class Trainer(Base):
            def __init__(self): super().__init__(); self.state = State()
            def step(self, x): return self.update(x, self.state.factor)
            def between(self, n): self.state.step += 1; self.state.log.append({"step": n})
            def change(self): self.state.factor = 3.0
    """,
    "attributes of the model and of a layer": """
        class Trainer(Base):
            def __init__(self): super().__init__(); self.model.epoch = 0; self.model.factor = 2.0
            def step(self, x): return self.update(x, self.model.factor)
            def between(self, n): self.model.epoch += 1; self.model[0].note = str(n)
            def change(self): self.model.factor = 3.0
    """,
    "a name that is worked out": """
        class Trainer(Base):
            def __init__(self): super().__init__(); self.factor_a, self.kind, self.steps = 2.0, "a", 0
            def step(self, x): return self.update(x, getattr(self, "factor_" + self.kind))
            def between(self, n): self.steps += 1; setattr(self, f"extra{n}", n)
            def change(self): self.factor_a = 3.0
    """,
    "a text that is formatted": """
        class Trainer(Base):
            def __init__(self): super().__init__(); self.factor, self.steps = 2.0, 0
            def step(self, x): return self.update(x, float("{0.factor}".format(self)))
            def between(self, n): self.steps += 1
            def change(self): self.factor = 3.0
    """,
    "an object that is copied": """
        class Config:
            def __init__(self): self.factor = 2.0
        class Trainer(Base):
            def __init__(self): super().__init__(); self.config, self.steps, self.logs = Config(), 0, {}
            def step(self, x): return self.update(x, copy.deepcopy(self.config).factor)
            def between(self, n): self.steps += 1; self.logs[n] = n
            def change(self): self.config.factor = 3.0
    """,
    "all attributes of an object": """
        class Config:
            def __init__(self): self.factor = 2.0
        class Trainer(Base):
            def __init__(self): super().__init__(); self.config, self.steps, self.logs = Config(), 0, {}
            def step(self, x): return self.update(x, vars(self.config)["factor"])
            def between(self, n): self.steps += 1; self.logs[n] = n
            def change(self): self.config.factor = 3.0
    """,
    "all fields of a dataclass": """
        @dataclasses.dataclass
        class Config:
            factor: float = 2.0
        class Trainer(Base):
            def __init__(self): super().__init__(); self.config, self.steps, self.logs = Config(), 0, {}
            def step(self, x): return self.update(x, dataclasses.asdict(self.config)["factor"])
            def between(self, n): self.steps += 1; self.logs[n] = n
            def change(self): self.config.factor = 3.0
    """,
    "an attribute getter": """
        getter = operator.attrgetter("config.factor")
        class Config:
            def __init__(self): self.factor, self.seen = 2.0, 0
        class Trainer(Base):
            def __init__(self): super().__init__(); self.config, self.factor = Config(), 0
            def step(self, x): return self.update(x, getter(self))
            def between(self, n): self.config.seen += 1; self.factor += 1
            def change(self): self.config.factor = 3.0
    """,
    "the same name in another object": """
        class Meter:
            def __init__(self): self.factor = 0
        class Trainer(Base):
            def __init__(self): super().__init__(); self.factor, self.meter = 2.0, Meter(); self.meters = [self.meter]
            def step(self, x): self.meters; return self.update(x, self.factor)
            def between(self, n): self.meter.factor += 1
            def change(self): self.factor = 3.0
    """,
    "attributes of a class": """
        class Trainer(Base):
            total, factor = 0, 2.0
            def step(self, x): return self.update(x, self.factor)
            def between(self, n): Trainer.total += 1
            def change(self): Trainer.factor = 3.0
    """,
    "as transformers does": """
        class State:
            def __init__(self): self.global_step, self.epoch, self.log_history = 0, 0.0, []
        class Control:
            def __init__(self): self.should_log = False
        class Callback:
            def on_step_end(self, trainer): trainer.control.should_log = trainer.state.global_step % 3 == 0
        class Trainer(Base):
            def __init__(self):
                super().__init__()
                self.args = types.MappingProxyType({"factor": 2.0})
                self.state, self.control, self.callbacks, self.flos = State(), Control(), [Callback()], 0
            def step(self, x):
                self.model.train()
                return self.update(x, self.args["factor"])
            def between(self, n):
                self.state.global_step += 1
                self.state.epoch = self.state.global_step / 100
                self.flos += 10
                for callback in self.callbacks: callback.on_step_end(self)
                if self.control.should_log: self.state.log_history.append({"step": n})
            def change(self): self.args = {"factor": 3.0}
    """,
    "as lightning does": """
        class Loop:
            def __init__(self): self.global_step, self.batch_idx, self.metrics = 0, 0, {}
        class Lit(nn.Module):
            def __init__(self, net): super().__init__(); self.net, self.factor, self._current_fx, self.logged = net, 2.0, "", {}
            def forward(self, x): return self.net(x) * self.factor
        class Trainer(Base):
            def __init__(self):
                super().__init__()
                self.model, self.loop = Lit(self.model), Loop()
                self.model.trainer = self
            def step(self, x): return self.update(x)
            def between(self, n):
                self.loop.global_step += 1
                self.loop.batch_idx = n
                self.loop.metrics[f"loss {n}"] = n
                self.model._current_fx = f"training_step {n}"
                self.model.logged[n] = n
            def change(self): self.model.factor = 3.0
    """,
    "as accelerate does": """
        class Gradients:
            def __init__(self): self.sync, self.step, self.extra = True, 0, {}
        class Accelerator:
            def __init__(self): self.gradients, self.factor, self.trackers = Gradients(), 2.0, []
            def backward(self, loss): (loss * self.factor).backward()
        accelerator = Accelerator()
        class Trainer(Base):
            def step(self, x):
                self.optimizer.zero_grad()
                loss = self.model(x).square().mean()
                accelerator.backward(loss)
                if accelerator.gradients.sync:
                    nn.utils.clip_grad_norm_(self.model.parameters(), 100.0)
                self.optimizer.step()
                return loss.detach()
            def between(self, n):
                accelerator.gradients.step += 1
                accelerator.gradients.extra[n] = n
                accelerator.trackers.append(n)
            def change(self): accelerator.factor = 3.0
    """,
    "meters of a dictionary that makes them": """
        class Meter:
            def __init__(self): self.sum, self.n = 0.0, 0
            def update(self, value): self.sum += value; self.n += 1
        class Trainer(Base):
            def __init__(self): super().__init__(); self.meters, self.factor = collections.defaultdict(Meter), 2.0
            def step(self, x): return self.update(x, self.factor)
            def between(self, n): self.meters["loss"].update(n); self.meters[n].update(1)
            def change(self): self.factor = 3.0
    """,
    "a property, and one that is worked out once": """
        class Trainer(Base):
            def __init__(self): super().__init__(); self.half, self.seen = 1.0, 0
            @property
            def factor(self): return self.half * 2
            @functools.cached_property
            def shift(self): return self.half
            def step(self, x): return self.update(x + self.shift, self.factor)
            def between(self, n): pass
            def change(self): self.half = 1.5
    """,
}


@pytest.fixture(autouse=True)
def _heard(device):
    if device.type != "cpu" and sys.version_info < (3, 12):
        pytest.skip("what a backward calls on a GPU is heard from Python 3.12 on")


def trainer(source, device):
    space = {"device": device, "__name__": "a_loop"}
    exec(compile(COMMON + textwrap.dedent(source), "/users/loop.py", "exec"), space)
    return space["Trainer"]()


@pytest.mark.parametrize("loop", LOOPS)
def test_c09_what_a_step_does_not_read_is_no_reason_to_record_anew(device, loop):
    mine, plain, x = trainer(LOOPS[loop], device), trainer(LOOPS[loop], device), ramp(device, 2, 3)
    step = pg.record(mine.step)
    for n in range(STEPS):
        assert_same(step(x), plain.step(x))
        mine.between(n)
        plain.between(n)
    assert pg.stats(step).recorded == 1, pg.explain(step)
    assert pg.stats(step).live <= STEPS // 2, pg.explain(step)
    mine.change()
    plain.change()
    assert_same(step(x), plain.step(x))
    assert_same(step(x), plain.step(x))


# Reads of a dictionary that are more than those of one key: what is put under another one counts then.
IN_OTHER_WAYS = {
    "all its values": "sum(self.config.values())",
    "how many there are": "float(len(self.config))",
    "under a name": "(lambda c: c['factor'] * len(c))(self.config)",
    "the key is worked out": "self.config['fac' + 'tor'] + self.config.get(self.other, 0.0)",
    "whether it is there": "2.0 if 'other' in self.config else 1.0",
    "whether one of two is there": "2.0 if ('other' if self.other else 'factor') in self.config else 1.0",
    "unpacked": "(lambda factor, other=1.0: factor * other)(**self.config)",
    "one of two": "(self.config if self.other else {'factor': 1.0})['factor'] + sum(self.config.values())",
}


@pytest.mark.parametrize("read", IN_OTHER_WAYS)
@pytest.mark.parametrize("where", ["attribute", "global", "closure"])
def test_c09_all_that_a_dictionary_has_is_read(device, read, where):
    expression = IN_OTHER_WAYS[read]
    config = "self.config" if where == "attribute" else "CONFIG"
    source = f"""
        class Trainer(Base):
            def __init__(self): super().__init__(); self.config, self.other = {{"factor": 2.0}}, "other"
            def step(self, x): return self.update(x, {expression.replace("self.config", config)})
            def change(self): {config}["other"] = 3.0
    """
    source = textwrap.dedent(source)
    if where == "global":
        source = 'CONFIG = {"factor": 2.0}\n' + source
    elif where == "closure":
        source = textwrap.indent('CONFIG = {"factor": 2.0}\n' + source, "    ")
        source = f"def made():\n{source}\n    return Trainer\nTrainer = made()\n"
    assert_noticed(trainer(source, device), trainer(source, device), ramp(device, 2, 3))


AS_A_WHOLE = {
    "a local variable": ("{'factor': 2.0, 'done': ''}", "(lambda found: found['factor'])(config)", "config['done'] += '.'"),
    "a key that is worked out": ("{'factor': 2.0, 'done': ''}", "config['fac' + self.tor]", "config['done'] += '.'"),
    "a dictionary in one": ("{'in': {'factor': 2.0, 'done': ''}}", "config['in']['factor']", "config['in']['done'] += '.'"),
}


@may_run_live
@pytest.mark.parametrize("kind", AS_A_WHOLE)
def test_c09_what_counts_as_a_whole(device, kind):
    """A text beside what is read that grows runs live in the end, and is named. (A number is followed.)"""
    made, read, counts = (text.replace("config", "self.config") for text in AS_A_WHOLE[kind])
    source = f"""
        class Trainer(Base):
            def __init__(self): super().__init__(); self.config, self.tor = {made}, "tor"
            def step(self, x): return self.update(x, {read})
            def between(self): {counts}
    """
    mine, plain, x = trainer(source, device), trainer(source, device), ramp(device, 2, 3)
    step = pg.record(mine.step)
    for _ in range(STEPS):
        assert_same(step(x), plain.step(x))
        mine.between()
        plain.between()
    assert "done changes from call to call" in reasons(step)


TWICE = {
    "two attributes": ("self.same = self.config", "self.same"),
    "an attribute and a list": ("self.list = [self.config]", "self.list[0]"),
    "an attribute and a function": ("self.f = lambda config=self.config: len(config)", "range(self.f())"),
    "an attribute and a class": ("Trainer.same = self.config", "Trainer.same"),
    "a class, by itself and by an object": ("Trainer.config = self.__dict__.pop('config')", "Trainer.config"),
    "an attribute and a slot": ("self.slot = Slot(self.config)", "self.slot.value"),
    "an attribute and a partial": ("self.f = functools.partial(len, self.config)", "range(self.f())"),
}


@pytest.mark.parametrize("where", TWICE)
def test_c09_a_dictionary_that_is_found_twice(device, where):
    keep, again = TWICE[where]
    source = f"""
        class Slot:
            __slots__ = ("value",)
            def __init__(self, value): self.value = value
        class Trainer(Base):
            def __init__(self): super().__init__(); self.config = {{"factor": 2.0}}; {keep}
            def step(self, x): return self.update(x, self.config["factor"] * len({again}))
            def change(self): self.config["other"] = 3.0
    """
    mine, plain, x = trainer(source, device), trainer(source, device), ramp(device, 2, 3)
    step = pg.record(mine.step)
    for _ in range(6):
        assert_same(step(x), plain.step(x))
    mine.change()
    plain.change()
    assert_same(step(x), plain.step(x))


@pytest.mark.parametrize("of", ["self", "self.model"])
def test_c09_what_is_set_to_what_it_was(device, of):
    """A replay does not set it: it has to be what it was."""
    source = f"""
        class Trainer(Base):
            def __init__(self): super().__init__(); {of}.mode = "idle"
            def step(self, x):
                {of}.mode = "idle"
                return self.update(x)
            def change(self): {of}.mode = "busy"
            def now(self): return {of}.mode
    """
    assert_set_again(trainer(source, device), ramp(device, 2, 3))


@may_run_live
def test_c12_classes_are_what_they_were(device):
    """They have had a gate for the time of a capture, also of one that came to nothing."""

    class Config:
        factor = 2.0

    config, net, x = Config(), nn.Linear(3, 3).to(device), ramp(device, 2, 3)
    config.factor = 2.0
    before = [dict(vars(kind)) for kind in (Config, nn.Module, nn.Linear)]
    recorded = pg.record(lambda x, fails: net(x) * config.factor * (1.0 if not fails else float(x.sum().item())),
                         fallback="live")  # fmt: skip
    for fails in [False] * 4 + [True] * 4:
        recorded(x, fails)
    assert pg.stats(recorded).replayed, pg.explain(recorded)
    assert pg.stats(recorded).refusals, pg.explain(recorded)
    pg.reset(recorded)
    assert [dict(vars(kind)) for kind in (Config, nn.Module, nn.Linear)] == before
