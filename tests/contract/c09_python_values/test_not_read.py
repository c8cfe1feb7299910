"""C9: what no code of the function reads does not count."""

import argparse
import collections
import contextlib
import copy
import dataclasses
import functools
import operator
import queue
import sys
import threading
import types
import typing

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.testing import Pair, assert_same
from tests.contract.shared.corners import globals_as_before  # noqa: F401
from tests.helpers import counts, may_run_live, ramp, reasons, side_by_side

SCALE = 2.0


def set_scale(value=3.0):
    globals().update(SCALE=value)


class Trainer:
    def __init__(self, device):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.steps, self.history, self.data = 0, [], iter(range(1000))

    def step(self, x):
        self.optimizer.zero_grad()
        loss = self.model(x).square().sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def test_c09_a_trainer_that_counts_its_steps_outside_of_them(device):
    def make():
        trainer = Trainer(device)
        return trainer.step, trainer

    both = side_by_side(make)
    for _ in range(12):
        loss = both(torch.randn(2, 4, device=device))
        for trainer, value in ((both.state, loss.recorded), (both.live_state, loss.live)):
            trainer.steps += 1
            trainer.history.append(value)
            trainer.last = value
    live, recorded, _ = counts(both)
    assert live + recorded <= 5, reasons(both)


def test_c09_arguments_of_a_program_that_count_beside_those_that_are_read(device):
    args = argparse.Namespace(by=2.0, epoch=0)
    step = pg.record(lambda x: x * args.by, warmup=1)
    for n in range(8):
        args.by = 2.0 + n // 4
        assert_same(step(ramp(device, 4)), ramp(device, 4) * args.by)
        args.epoch += 1
    assert pg.stats(step).recorded == 2, reasons(step)


def test_c09_a_step_that_makes_a_frozen_dataclass(device):
    """Its constructor sets attributes by ``object.__setattr__``, with names that stand there: it reads no others."""

    @dataclasses.dataclass(frozen=True)
    class Scale:
        by: float

    class Counting:
        def step(self, x):
            return x * Scale(2.0).by

    trainer = Counting()
    trainer.steps = 0
    step = pg.record(trainer.step, warmup=1)
    for _ in range(6):
        step(ramp(device, 4))
        trainer.steps += 1
    assert pg.stats(step).replayed == 5, reasons(step)


def test_c09_a_module_that_counts_its_calls_outside(device):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = nn.Linear(4, 4), 0

        def forward(self, x):
            return self.layer(x)

    net = Net().to(device).requires_grad_(False)
    f = pg.record(net.forward, warmup=1)
    for _ in range(12):
        f(ramp(device, 4))
        net.seen += 1
    assert pg.stats(f).replayed == 11


@pytest.mark.parametrize("reads", ["getattr(self, name)", "vars(self)[name]", "self.__dict__[name]"])
def test_c09_an_attribute_that_is_read_by_a_computed_name(device, reads):
    space = {}
    exec(f"class C:\n    def f(self, x):\n        name = ''.join(['b', 'y'])\n        return x * {reads}\n", space)
    held = space["C"]()
    held.by = 2.0
    f = pg.record(held.f, warmup=1)
    for n in range(8):
        held.by = 2.0 + n // 4
        assert_same(f(ramp(device, 4)), ramp(device, 4) * (2.0 + n // 4))


def test_c09_an_attribute_that_a_constructor_reads(device):
    class Config:
        by = None

        def __init__(self):
            self.by = 2.0

    class Part:
        def __init__(self, config):
            self.factor = config.by

    config = Config()
    f = pg.record(lambda x: x * Part(config).factor, warmup=1)
    for n in range(8):
        config.by = 2.0 + n // 4
        assert_same(f(ramp(device, 4)), ramp(device, 4) * (2.0 + n // 4))


@may_run_live
def test_c09_an_ordered_dictionary_that_loses_its_first(device):
    held = collections.OrderedDict((n, 0) for n in "abcdef")

    def f(x):
        del held[next(iter(held))]
        return x * len(held)

    f = pg.record(f, warmup=1)
    for n in range(5, 0, -1):
        assert_same(f(ramp(device, 4)), ramp(device, 4) * n)
        assert list(held.items()) == [(k, 0) for k in "abcdef"[6 - n :]]


class Counts:
    def __init__(self):
        self.n = 0

    def close(self):
        self.n += 1

    def write(self, text):
        self.n += 1

    def keys(self):
        self.n += 1
        return ["a"]

    def __getitem__(self, key):
        return 2.0


EFFECTS = {
    "closing": lambda x, held: [contextlib.closing(held).__exit__(), x][1],
    "with closing": lambda x, held: with_closing(x, held),
    "dict": lambda x, held: x * dict(held)["a"],
    "stars": lambda x, held: (lambda **kw: x * kw["a"])(**held),
}


def with_closing(x, held):
    with contextlib.closing(held):
        return x * 2


@may_run_live
@pytest.mark.parametrize("effect", EFFECTS.values(), ids=EFFECTS)
def test_c09_an_effect_in_a_method_that_others_call(device, effect):
    held = Counts()
    f = pg.record(lambda x: effect(x, held), warmup=1)
    for n in range(1, 6):
        f(ramp(device, 4))
        assert held.n == n


class Shown:
    def keys(self):
        return self.shown

    def __getitem__(self, key):
        return 2.0


class Meter:
    def __init__(self, config):
        self.config, self.total = config, config.start

    def reset(self):
        self.__init__(self.config)


class Around:
    def __init__(self, config):
        self.config = config
        self.total = vars(config)["START".lower()]

    def again(self):
        self.__init__(self.config)


class Named:
    pass


def wrapped_constructor(method):
    @functools.wraps(method)
    def wrapper(*args):
        return method(*args)

    return wrapper


class Wrapped:
    @wrapped_constructor
    def __init__(self, config):
        self.total = config.start


class Derived(Meter):
    def __init__(self, config):
        super().__init__(config)


def named(**values):
    made = Named()
    made.__dict__.update(values)
    return made


def through(look_up):
    """A function that reads by one that it was handed."""
    return lambda x, held: x * look_up(held["a"], "START".lower())


READERS = {
    "keys": lambda x, held: x * len(dict(held["b"])),
    "constructor called again": lambda x, held: (held["c"].reset(), x * held["c"].total)[1],
    "wrapped constructor": lambda x, held: x * Wrapped(held["a"]).total,
    "constructor that looks around": lambda x, held: (held["d"].again(), x * held["d"].total)[1],
    "subclass": lambda x, held: x * Meter.__subclasses__()[0](held["a"]).total,
    "format": lambda x, held: x * float("{c.start}".format(c=held["a"])),
    "attrgetter": lambda x, held: x * operator.attrgetter("START".lower())(held["a"]),
    "getattr in a closure": through(getattr),
    "vars in a closure": through(functools.partial(lambda look, c, name: look(c)[name], vars)),
    "__getattribute__": lambda x, held: x * held["a"].__getattribute__("START".lower()),
    "upper": lambda x, held: x * getattr(held["a"], "START".lower()),
}


@may_run_live
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_c09_an_attribute_that_is_read_in_a_roundabout_way(device, read):
    config, shown = named(start=1.0), Shown()
    shown.shown = ["a"]
    held = {"a": config, "b": shown, "c": Meter(config), "d": Around(config)}
    f = pg.record(lambda x: read(x, held), warmup=1)
    for n in range(9):
        config.start = 1.0 + n // 3
        shown.shown = ["a", "b", "c"][: 1 + n // 3]
        assert_same(f(ramp(device, 4)), ramp(device, 4) * (1.0 + n // 3))


@may_run_live
def test_c09_an_attribute_that_is_written_in_a_roundabout_way(device):
    class Own:
        def __setattr__(self, name, value):
            super().__setattr__("_" + name, value)

    held = Own()

    def f(x):
        held.kind = 1
        return x * 2

    f = pg.record(f, warmup=1)
    for _ in range(3):
        f(ramp(device, 4))
    held.__dict__["_kind"] = 2
    f(ramp(device, 4))
    assert held._kind == 1


def test_c09_a_global_in_a_method_that_only_a_library_calls(device):
    class Held(collections.UserDict):
        def __missing__(self, key):
            return SCALE

        def close(self):
            kept.append(SCALE)

    kept, held = [], Held()
    f = pg.record(lambda x: x * held["a"], warmup=1)
    g = pg.record(lambda x: (contextlib.closing(held).__exit__(), x * 2)[1], warmup=1)
    for n in range(6):
        set_scale(2.0 + n // 3)
        assert_same(f(ramp(device, 4)), ramp(device, 4) * SCALE)
    pairs = [(g(ramp(device, 4)), len(kept)) for n in range(4)]
    assert [n for _, n in pairs] == [1, 2, 3, 4]
    set_scale(7.0)
    g(ramp(device, 4))
    assert kept == [3.0] * 4 + [7.0]


def test_c09_a_library_that_names_a_method_which_does_not_run(device):
    """That the standard library's code has the word `train` in it makes no difference."""

    class Task:
        def __init__(self):
            self.scale, self.seen = 2.0, 0

        def close(self):
            self.seen += 1

        def step(self, x):
            with contextlib.ExitStack():
                return x * self.scale

    task = Task()
    f = pg.record(task.step, warmup=1)
    for _ in range(12):
        f(ramp(device, 4))
        task.close()
    assert pg.stats(f).replayed == 11, reasons(f)


def test_c09_a_scheduler_beside_an_optimizer_made_with_keywords(device):
    class Task:
        def __init__(self):
            torch.manual_seed(0)
            self.model = nn.Linear(4, 3).to(device)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
            self.cache = {"a": 1.0}

        def scale(self):
            try:
                return self.cache["a"]
            except KeyError:
                return 2.0

        def step(self, x, y):
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), y) * self.scale()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

    def make():
        task = Task()
        return task.step, task

    both = side_by_side(make)
    for _ in range(14):
        both(torch.randn(5, 4, device=device), torch.randint(0, 3, (5,), device=device))
        for task in (both.state, both.live_state):
            task.scheduler.step()
    live, recorded, _ = counts(both)
    assert live + recorded <= 4, reasons(both)


def test_c18_a_setting_that_changes_while_results_are_held(device):
    held = types.SimpleNamespace(by=1.0)
    f = pg.record(lambda x: x * held.by, warmup=1)
    for epoch in range(14):
        held.by = 1.0 + epoch
        for _ in range(60):
            result = f(torch.ones(40_000, device=device))
        assert result[0].item() == held.by
    assert not pg.stats(f).refusals, reasons(f)


def test_c19_new_shapes_between_many_replays_are_nothing_to_tell(device):
    f = pg.record(lambda a: a + 1, warmup=1, fallback="error")
    for n in range(80):
        for _ in range(3):
            f(torch.ones(4, device=device))
        f(torch.ones(5 + n, device=device))


def test_c07_a_state_dict_as_an_argument(device):
    layer = nn.Linear(3, 3).to(device)
    f = pg.record(lambda x, state: x * len(state._metadata) + state["weight"][0].detach(), warmup=1)
    for n in range(5):
        x = ramp(device, 3, start=n)
        assert_same(f(x, layer.state_dict()), x + layer.weight[0].detach())
    assert pg.stats(f).replayed == 4, reasons(f)


def test_c09_an_attribute_that_the_function_had_before(device):
    def h(x):
        return x * h.scale

    h.scale = 1.0
    h = pg.record(h, warmup=1)
    for n in range(6):
        if n == 3:
            h.scale = 4.0
        assert_same(h(ramp(device, 3)), ramp(device, 3) * (4.0 if n >= 3 else 1.0))


@may_run_live
def test_c12_a_replaced_dictionary_of_attributes_is_put_back(device):
    held, state = named(n=1), {"n": 5}

    def f(x):
        held.__dict__ = state
        held.n += 1
        return x * held.n

    f = pg.record(f, warmup=0)
    for n in range(3):
        assert_same(f(ramp(device, 3)), ramp(device, 3) * (6 + n))
    assert state["n"] == 8


@may_run_live
def test_c12_a_view_of_every_second_byte(device):
    memory = bytearray(8)
    view = memoryview(memory)[::2]

    def f(x):
        view[0] += 1
        return x * 2

    f = pg.record(f, warmup=1)
    for n in range(1, 5):
        f(ramp(device, 3))
        assert memory[0] == n


def test_c17_a_reset_of_a_method_while_another_thread_is_busy(device):
    class Own:
        @pg.record(warmup=1)
        def f(self, x):
            return x * 2

    own, x = Own(), ramp(device, 3)
    for _ in range(3):
        own.f(x)
    go, done = threading.Event(), threading.Event()

    def slow(a):
        go.set()
        done.wait(10)
        return a

    thread = threading.Thread(target=lambda: pg.record(slow, warmup=1)(x))
    thread.start()
    go.wait()
    pg.reset(Own.f)
    done.set()
    thread.join()
    own.f(x)
    own.f(x)
    assert pg.stats(Own.f).recorded == 2


@pytest.mark.parametrize(("kind", "recordings"), [(str, 12), (int, 2), (float, 2)])  # numbers that have changed are followed
def test_c18_a_setting_that_changes_once_an_epoch_for_ever(device, kind, recordings):
    held = types.SimpleNamespace(by=kind(1))
    f = pg.record((lambda x: x * float(held.by)) if kind is str else (lambda x: x * held.by), warmup=1)
    for epoch in range(12):
        held.by = kind(1 + epoch)
        for _ in range(60):
            assert_same(f(ramp(device, 4)), ramp(device, 4) * float(held.by))
    stats = pg.stats(f)
    assert stats.recorded == recordings, reasons(f)
    assert stats.live == recordings


def test_c19_a_number_that_is_another_in_each_call(device):
    f = pg.record(lambda x, by: x * float(str(by)), warmup=1)
    for n in range(66):  # for two of them, it was followed
        assert_same(f(ramp(device, 4), n), ramp(device, 4) * n)
    with pytest.warns(pg.RunsLive, match="another value of `by`"):
        f(ramp(device, 4), 66)
    assert pg.stats(f).refusals


_library = {"dataclasses": dataclasses, "__name__": "loops"}
exec(compile("""
class Config:
    def __init__(self):
        self.scale = 2.0

    def __getattribute__(self, key):
        return super().__getattribute__("scale" if key == "size" else key)

@dataclasses.dataclass
class Output:
    loss: object
    rest: object = None

    def __post_init__(self):
        self.given = [f.name for f in dataclasses.fields(self) if self.__dict__[f.name] is not None]

class Mixin:
    pass

class Strict:
    def __getattribute__(self, key):
        if super().__getattribute__("__dict__").get("strict") is not None and key == "scale":
            return 0.5
        return super().__getattribute__(key)

class Mixed(Config, Mixin, Strict):
    def __getattribute__(self, key):
        return super().__getattribute__("scale" if key == "size" else key)

class Loop:
    def __init__(self, model, config=Config):
        self.model, self.config, self.flos = model, config(), 0

    def training_step(self, x):
        output = Output(self.model(x).square().sum() * self.config.size)
        output.loss.backward()
        return output.loss.detach()

    def read(self, key):
        return super().__getattribute__(key)
""", "/usr/lib/site-packages/loops.py", "exec"), _library)  # fmt: skip


def _loop(device, step=lambda loop: loop.training_step, config="Config"):
    def make():
        torch.manual_seed(0)
        loop = _library["Loop"](nn.Linear(4, 2).to(device), _library[config])
        return step(loop), loop

    return make


def test_c09_a_library_counts_beside_classes_that_look_attributes_up_themselves(device):
    """As transformers' Trainer counts operations: its configurations have such a class, its outputs tell their fields."""
    both = side_by_side(_loop(device))
    for n in range(12):
        both(ramp(device, 2, 4, start=n))
        both.change(lambda loop: setattr(loop, "flos", loop.flos + 100))
        both.change(lambda loop: loop.model.zero_grad())
    assert counts(both)[1:] == (1, 11), reasons(both)
    both.change(lambda loop: setattr(loop.config, "scale", 3.0))
    both(ramp(device, 2, 4))


@may_run_live
def test_c09_a_library_looks_an_attribute_up_past_its_class(device):
    both = side_by_side(_loop(device, lambda loop: lambda x: x * loop.read("FLOS".lower())))
    for n in range(12):
        both(ramp(device, 2, 4, start=n))
        if n % 3 == 2:
            both.change(lambda loop: setattr(loop, "flos", loop.flos + 100))


def test_c09_a_configuration_that_is_saved(device):
    """As transformers' Trainer writes into a configuration when it saves a checkpoint; of the configuration counts what is
    read, also where its class looks attributes up by `super()`, and another class behind it."""
    both = side_by_side(_loop(device, config="Mixed"))
    for n in range(12):
        both(ramp(device, 2, 4, start=n))
        both.change(lambda loop: setattr(loop.config, "architectures", ["Loop"]))
        both.change(lambda loop: loop.model.zero_grad())
    assert counts(both)[1:] == (1, 11), reasons(both)
    both.change(lambda loop: setattr(loop.config, "scale", 3.0))
    both(ramp(device, 2, 4))
    assert counts(both)[0] == 2
    both(ramp(device, 2, 4))
    both.change(lambda loop: setattr(loop.config, "strict", True))
    both(ramp(device, 2, 4))
    assert counts(both)[0] == 3


class _Watched:
    """As a trainer with a thread beside it that looks at its jobs, again and again."""

    def __init__(self, device):
        torch.manual_seed(0)
        self.net, self.jobs, self.done = nn.Linear(4, 2).to(device), queue.Queue(), False
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        self.watcher = threading.Thread(target=self.watch, daemon=True)

    def watch(self):
        while not self.done:
            self.jobs.qsize()

    def step(self, x):
        self.optimizer.zero_grad()
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def test_c09_what_a_thread_beside_the_call_reads(device):
    ours, theirs = _Watched(device), _Watched(device)
    step, interval = pg.record(ours.step, keep="always"), sys.getswitchinterval()
    ours.watcher.start()
    sys.setswitchinterval(1e-5)
    try:
        for n in range(12):
            assert_same(step(ramp(device, 3, 4, start=n)), theirs.step(ramp(device, 3, 4, start=n)))
            ours.jobs.put(n)
    finally:
        ours.done = True
        sys.setswitchinterval(interval)
        ours.watcher.join()
    assert pg.stats(step).recorded == 1, reasons(step)


@typing.runtime_checkable
class Scales(typing.Protocol):
    scale: float


def test_c09_what_asks_whether_something_has_what_a_protocol_names(device):
    class Trainer:
        def __init__(self):
            self.config, self.seen = types.SimpleNamespace(scale=2.0), 0
            self.other = Plain(2.0)

        def step(self, x):
            return x * (self.other.value if isinstance(self.other, Scales) else 1.0)

    class Plain:
        def __init__(self, value):
            self.value = value

    def make():
        trainer = Trainer()
        return trainer.step, trainer

    both = side_by_side(make)
    for n in range(8):
        both(ramp(device, 4))
        both.change(lambda trainer, n=n: setattr(trainer, "seen", n))
    assert counts(both)[1:] == (1, 7), reasons(both)
    both.change(lambda trainer: setattr(trainer.other, "scale", 1.0))
    both(ramp(device, 4))
    assert counts(both)[0] == 2


@typing.runtime_checkable
class Counted(typing.Protocol):
    seen: int


class Counting:
    def __init__(self):
        self.seen = 0

    def scaled(self, x):
        self.seen += 1
        return x * (2.0 if isinstance(self, Scales) else 1.0)

    def counted(self, x):
        self.seen += 1
        return x * (2.0 if isinstance(self, Counted) else 1.0)


@pytest.mark.parametrize("name", ["scaled", "counted"])
def test_c09_a_count_beside_what_asks_for_an_attribute_by_a_protocol(device, name):
    """By the name that it asks for, it reads no other."""

    def make():
        counting = Counting()
        return getattr(counting, name), counting

    both = side_by_side(make)
    for _ in range(8):
        both(ramp(device, 4))
    assert counts(both)[1:] == (1, 7), reasons(both)
    both.change(lambda counting: setattr(counting, "scale", 1.0))
    both(ramp(device, 4))


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    number: int
    path: str


class Labelled:
    def __init__(self, x, number, path):
        self.x, self.number, self.path = x, number, path


SAMPLED = {
    "not read": (lambda s: s.x * 2, True),
    "given back": (lambda s: (s.x * 2, s), True),
    "a number beside it": (lambda s: s.x * s.number, True),
    "read": (lambda s: s.x * len(s.path), False),
    "read by a name": (lambda s: s.x * len(getattr(s, "pa" + "th")), False),
    "returned": (lambda s: (s.x * 2, s.path), False),
    "copied": (lambda s: (s.x * 2, copy.copy(s)), False),
    "set": (lambda s: setattr(s, "path", "known") or s.x * 2, False),
    "read now and then": (lambda s: s.x * (2 if s.number % 5 else len(s.path)), False),
    "all of them": (lambda s: s.x * len(vars(s)["path"]), False),
}


@may_run_live
@pytest.mark.parametrize("kind", [Sample, Labelled])
@pytest.mark.parametrize(("function", "replays"), SAMPLED.values(), ids=SAMPLED)
def test_c09_a_string_in_an_argument_that_no_code_reads(device, kind, function, replays):
    both = side_by_side(lambda: function, keep="always")
    for n in range(20):
        both(Pair.of(kind(ramp(device, 4), n, "s" * (n % 7) + str(n))))
    assert counts(both)[1:] == (1, 16) or not replays, reasons(both)
