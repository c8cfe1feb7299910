"""C9: Python values that the function reads are noticed when they change."""

import functools

import pytest
import torch

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.shared.recognising import Cell
from tests.helpers import assert_replays, assert_settles, may_run_live, ramp, side_by_side

GLOBAL_SCALE = 2.0


GLOBAL_SETTINGS = {"scale": 2.0, "deep": {"shift": 1.0}}


def global_helper(x):
    return x * 2


class Config:
    scale = 2.0

    def __init__(self):
        self.shift = 1.0
        self.flags = {"on": True}
        self.powers = [1, 2]

    @property
    def doubled(self):
        return self.shift * 2


class Layer(torch.nn.Module):
    bias = 1.0

    def __init__(self):
        super().__init__()
        self.scale = 2.0
        self.config = Config()
        self.dropout = torch.nn.Dropout(0.5)
        self.steps = 2

    def helper(self, x):
        return x + self.config.shift

    def forward(self, x):
        for _ in range(self.steps):
            x = self.dropout(x) * self.scale + self.bias
        for power in self.config.powers:
            x = x**power
        if self.config.flags["on"]:
            x = x + self.config.doubled + self.config.scale
        return self.helper(x)


class OtherLayer(Layer):
    def helper(self, x):
        return x - self.config.shift


VALUE_CHANGES = {
    "attribute": lambda layer: setattr(layer, "scale", 3.0),
    "attribute, int for float": lambda layer: setattr(layer, "scale", 2),
    "a tensor for a number": lambda layer: setattr(layer, "scale", torch.tensor(3.0)),
    "loop count": lambda layer: setattr(layer, "steps", 3),
    "dropout's p": lambda layer: setattr(layer.dropout, "p", 0.1),
    "attribute of a plain object": lambda layer: setattr(layer.config, "shift", 5.0),
    "a plain object": lambda layer: setattr(layer, "config", _config_with(shift=9.0)),
    "dictionary": lambda layer: layer.config.flags.update(on=False),
    "list": lambda layer: layer.config.powers.append(2),
    "item of a list": lambda layer: layer.config.powers.__setitem__(1, 3),
    "instance attribute over a class attribute": lambda layer: setattr(layer.config, "scale", 7.0),
    "method of the instance": lambda layer: setattr(layer, "helper", lambda x: x * 100),
    "class of the instance": lambda layer: setattr(layer, "__class__", OtherLayer),
    "attribute deleted": lambda layer: _shadow_then_delete(layer),
    "forward of the instance": lambda layer: setattr(layer, "forward", lambda x: x * 100),
    "train and eval": lambda layer: layer.eval(),
    "training of one part": lambda layer: setattr(layer.dropout, "training", False),
}


def _config_with(**values):
    config = Config()
    config.__dict__.update(values)
    return config


def _shadow_then_delete(layer):
    layer.bias = 5.0
    del layer.bias


@may_run_live
@pytest.mark.parametrize("through", ["closure", "bound method", "module"])
@pytest.mark.parametrize("change", VALUE_CHANGES.values(), ids=VALUE_CHANGES)
def test_c09_a_value_that_the_function_reads_has_changed(device, change, through):
    def make():
        layer = Layer()
        return {"closure": lambda x: layer(x), "bound method": layer.forward, "module": layer.__call__}[through], layer

    both = side_by_side(make)
    for _ in range(4):
        both(ramp(device, 3))
    both.change(change)
    for _ in range(4):
        both(ramp(device, 3))


@pytest.mark.parametrize("name", ["attribute", "attribute of a plain object", "dictionary", "train and eval"])
def test_c09_after_a_changed_value_it_settles_again(device, name):
    def make():
        layer = Layer()
        return lambda x: layer(x), layer

    both = side_by_side(make)
    assert_settles(both, ramp(device, 3))
    both.change(VALUE_CHANGES[name])
    assert_settles(both, ramp(device, 3))


@pytest.mark.parametrize("attribute", ["scale", "bias"])
def test_c09_class_attributes(device, monkeypatch, attribute):
    class Own(Layer):
        scale_of_class = 2.0

        def forward(self, x):
            return x * Config.scale + self.bias

    layer = Own()
    f = pg.record(lambda x: layer(x), warmup=1)
    owner = {"scale": Config, "bias": Own}[attribute]
    for n in range(8):
        monkeypatch.setattr(owner, attribute, float(n // 2), raising=False)
        assert_same(f(ramp(device, 3)), ramp(device, 3) * Config.scale + layer.bias)


def test_c09_globals(device, monkeypatch):
    def reads(x):
        return global_helper(x) * GLOBAL_SCALE + GLOBAL_SETTINGS["deep"]["shift"]

    f = pg.record(reads, warmup=1)

    def check(times=3):
        for _ in range(times):
            assert_same(f(ramp(device, 3)), reads(ramp(device, 3)))

    check(4)
    monkeypatch.setitem(globals(), "GLOBAL_SCALE", 3.0)
    check()
    monkeypatch.setitem(GLOBAL_SETTINGS["deep"], "shift", 4.0)
    check()
    monkeypatch.setitem(globals(), "GLOBAL_SETTINGS", {"deep": {"shift": 6.0}})
    check()
    monkeypatch.setitem(globals(), "global_helper", lambda x: x * 50)
    check()
    monkeypatch.setitem(globals(), "global_helper", torch.neg)
    check()


def test_c09_closure_variables(device):
    def make():
        scale, mode = 2.0, "add"

        def f(x):
            return x + scale if mode == "add" else x * scale

        def change(new_scale, new_mode):
            nonlocal scale, mode
            scale, mode = new_scale, new_mode

        return f, change

    f, change = make()
    recorded = pg.record(f, warmup=1)
    for n in range(12):
        change(float(n // 3), "mul" if n > 5 else "add")
        assert_same(recorded(ramp(device, 3)), f(ramp(device, 3)))


def test_c09_default_arguments(device):
    def f(x, scale=2.0, *, shift=0.0, table={"power": 2}):  # noqa: B006 - mutable on purpose
        return x ** table["power"] * scale + shift

    recorded = pg.record(f, warmup=1)
    for change in [
        lambda: None,
        lambda: setattr(f, "__defaults__", (5.0,)),
        lambda: f.__kwdefaults__.update(shift=3.0),
        lambda: f.__kwdefaults__["table"].update(power=3),
    ]:
        change()
        for _ in range(3):
            assert_same(recorded(ramp(device, 3)), f(ramp(device, 3)))


def test_c09_code_of_a_helper_is_replaced(device):
    def helper(x):
        return x * 2

    def f(x):
        return helper(x) + 1

    recorded = pg.record(f, warmup=1)
    for n in range(8):
        if n == 4:
            helper.__code__ = (lambda x: x * 30).__code__
        assert_same(recorded(ramp(device, 3)), f(ramp(device, 3)))


@pytest.mark.parametrize("kind", ["partial", "callable object", "method", "class method", "static method", "builtin"])
def test_c09_every_kind_of_callable(device, kind):
    class Scaler:
        factor = 3.0

        def __init__(self):
            self.scale = 2.0

        def __call__(self, x):
            return x * self.scale

        def method(self, x):
            return x * self.scale + 1

        @classmethod
        def of_class(cls, x):
            return x * cls.factor

        @staticmethod
        def static(x):
            return x - 1

    def make():
        scaler = Scaler()
        found = {
            "partial": functools.partial(lambda scale, x, shift: x * scale.scale + shift, scaler, shift=1.0),
            "callable object": scaler,
            "method": scaler.method,
            "class method": scaler.of_class,
            "static method": Scaler.static,
            "builtin": torch.sin,
        }
        return found[kind], scaler

    both = side_by_side(make)
    for _ in range(4):
        both(ramp(device, 3))
    both.change(lambda scaler: setattr(scaler, "scale", 5.0))
    for _ in range(3):
        both(ramp(device, 3))
    Scaler.factor = 7.0
    for _ in range(3):
        both(ramp(device, 3))


def test_c09_keywords_of_a_partial(device):
    partial = functools.partial(lambda x, scale: x * scale, scale=2.0)
    f = pg.record(partial, warmup=1)
    for n in range(8):
        partial.keywords["scale"] = float(n // 2)
        assert f(torch.ones(2, device=device)).tolist() == [float(n // 2)] * 2


def test_c09_a_value_equal_but_of_another_type(device):
    def make():
        cell = Cell(s=1)
        return lambda x: x * cell.s, cell

    both = side_by_side(make)
    for s in [1, 1, 1, True, True, True, 1.0, 1.0, 1.0, 1, True, 1.0, 0.0, 0.0, -0.0, -0.0, 0.0]:
        both.change(lambda cell, s=s: setattr(cell, "s", s))
        both(torch.tensor([2, 3], device=device))


def test_c09_an_equal_value_in_a_new_object_is_no_change(device):
    def make():
        cell = Cell(scale=2.0, size=(1, 2), name="a" * 3)
        return lambda x: x * cell.scale * cell.size[1] * len(cell.name), cell

    both = side_by_side(make)
    assert_settles(both, ramp(device, 3))
    both.change(lambda cell: cell.__dict__.update(scale=float("2.0"), size=tuple(range(1, 3)), name="".join("aaa")))
    assert_replays(both, ramp(device, 3))


def test_c09_values_reached_through_a_property_a_getattr_and_a_getitem(device):
    class Magic:
        def __init__(self):
            self.table = {"scale": 2.0}

        def __getattr__(self, name):
            try:
                return self.__dict__["table"][name]
            except KeyError:
                raise AttributeError(name) from None

        def __getitem__(self, name):
            return self.table[name] + 1

        @property
        def tripled(self):
            return self.table["scale"] * 3

    def make():
        magic = Magic()
        return lambda x: x * magic.scale + magic["scale"] - magic.tripled, magic

    both = side_by_side(make)
    for n in range(9):
        both.change(lambda magic, n=n: magic.table.update(scale=float(n // 3)))
        both(ramp(device, 3))


def test_c09_the_length_of_a_list_and_the_keys_of_a_dictionary(device):
    def make():
        cell = Cell(items=[1.0], table={"a": 1.0})
        return lambda x: x * len(cell.items) + ("b" in cell.table), cell

    both = side_by_side(make)
    for n in range(9):
        if n == 3:
            both.change(lambda cell: cell.items.append(2.0))
        if n == 6:
            both.change(lambda cell: cell.table.update(b=2.0))
        both(ramp(device, 3))


@may_run_live
def test_c09_an_attribute_of_an_argument_tensor(device):
    def f(x):
        return x * getattr(x, "weight_of_it", 1.0)

    recorded = pg.record(f, warmup=1)
    for n in range(9):
        x = ramp(device, 3)
        if n > 3:
            x.weight_of_it = float(n // 2)
        assert_same(recorded(x), f(x))


def test_c09_the_requires_grad_of_a_weight(device):
    def make():
        layer = torch.nn.Linear(3, 3, device=device)

        def f(x):
            with torch.no_grad():
                return layer(x) * (2 if layer.weight.requires_grad else 3)

        return f, layer

    both = side_by_side(make)
    for on in [True, True, True, False, False, False, True, False]:
        both.change(lambda layer, on=on: layer.requires_grad_(on))
        both(ramp(device, 3))
