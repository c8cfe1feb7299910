"""Random functions that read attributes and dictionaries in random ways, while some of these change between calls: recorded and
live side by side.

PHONOGRAPH_FUZZ_READS functions (24), one a seed from PHONOGRAPH_FUZZ_SEED (0) on.
"""

import os
import random

import pytest
import torch
from torch import nn

import phonograph as pg
from tests.helpers import may_run_live

FIRST, HOW_MANY = (int(os.environ.get(f"PHONOGRAPH_FUZZ_{name}", n)) for name, n in (("SEED", 0), ("READS", 24)))
NAMES = ("a", "b", "c")
MADE = """
import copy, dataclasses, operator

@dataclasses.dataclass
class Fields:
    a: float = 1.0
    b: float = 2.0
    c: float = 3.0

class Plain:
    d = 4.0
    def __init__(self): self.a, self.b, self.c = 1.0, 2.0, 3.0

class Derived(Plain):
    @property
    def total(self): return self.a + self.b
    def __getattr__(self, name): return getattr(self.inner, name)

class Layer(nn.Module):
    d = 4.0
    def __init__(self): super().__init__(); self.a, self.b, self.c = 1.0, 2.0, 3.0
    def forward(self, x): return x * self.a

class Slots:
    __slots__ = ("a", "b", "c")
    def __init__(self): self.a, self.b, self.c = 1.0, 2.0, 3.0

class Holder: pass

holder = Holder()
holder.plain, holder.fields, holder.layer, holder.slots, holder.derived = Plain(), Fields(), Layer(), Slots(), Derived()
holder.derived.inner = Plain()
holder.derived.inner.e = 5.0
holder.table = {"a": 1.0, "b": 2.0, "c": {"a": 3.0, "b": 4.0}}
TABLE = {"a": 1.0, "b": 2.0, "c": {"a": 3.0, "b": 4.0}}
def shut():
    table = {"a": 1.0, "b": 2.0, "c": {"a": 3.0, "b": 4.0}}
    def f(x):
        y = x * 1
BODY
        return y
    return f, table
f, inside = shut()
"""


class Source:
    """Of one function, and of what changes between its calls."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.choice = self.random.choice

    def thing(self):
        return self.choice(["holder.plain", "holder.fields", "holder.layer", "holder.slots", "holder.derived"])

    def table(self):
        return self.choice(["holder.table", "TABLE", "table"])

    def read(self):
        name, thing, table = self.choice(NAMES), self.thing(), self.table()
        key, other = self.choice("ab"), self.choice("abx")
        return self.choice([
            f"{thing}.{name}", f"{thing}.{name}", f"getattr({thing}, 'abc'[{NAMES.index(name)}])", "holder.plain.d",
            "holder.layer.d", "holder.derived.total", "holder.derived.e", f"operator.attrgetter('{name}')({thing})",
            f"float('{{0.{name}}}'.format({thing}))", f"vars(holder.plain)['{name}']",
            "sum(dataclasses.astuple(holder.fields))",
            f"copy.copy(holder.plain).{name}", f"getattr({thing}, 'absent', 7.0)", f"{table}['{key}']",
            f"{table}['c']['{key}']", f"{table}.get('{other}', 1.0)", f"float(len({table}))",
            f"sum(v for v in {table}.values() if type(v) is float)", f"(lambda t: t['a'])({table})", f"float('x' in {table})",
            "holder.layer(x)",
        ])  # fmt: skip

    def text(self):
        body = [f"        y = y * ({self.read()}) + {n}" for n in range(self.random.randint(1, 4))]
        return MADE.replace("BODY", "\n".join(body))

    def change(self):
        """What changes, as a statement."""
        name, thing, value = self.choice((*NAMES, "more")), self.thing(), self.random.randint(1, 9) + 0.5
        table = self.choice(["holder.table", "TABLE", "inside"])
        if thing == "holder.slots" and name == "more":
            name = "a"
        return self.choice([
            f"{thing}.{name} = {value}", f"{thing}.{name} = {value}", f"{table}['{self.choice('abxyz')}'] = {value}",
            f"{table}['c']['{self.choice('abx')}'] = {value}", f"{self.choice(['Plain', 'Layer', 'Derived'])}.d = {value}",
            f"holder.derived.inner.e = {value}", f"{table}.pop('x', None)", f"holder.plain.__dict__['{name}'] = {value}",
            f"holder.{self.choice(['plain', 'fields'])} = type(holder.{self.choice(['plain', 'fields'])})()",
            "holder.plain.d = 6.5", f"holder.note = {value}",
        ])  # fmt: skip


@may_run_live
@pytest.mark.parametrize("seed", range(FIRST, FIRST + HOW_MANY))
def test_c09_random_reads_are_noticed_when_they_change(device, seed):
    source = Source(seed)
    text, sides = source.text(), []
    for _ in range(2):
        space = {"torch": torch, "nn": nn, "__name__": "read_at_random"}
        exec(compile(text, f"{__file__}.{seed}", "exec"), space)
        sides.append(space)
    recorded, x, changes = pg.record(sides[0]["f"]), torch.rand(3, device=device), []
    for n in range(36):
        if n % 5 == 4:
            changes.append(source.change())
            for space in sides:
                exec(changes[-1], space)
        outcomes = []
        for f in (recorded, sides[1]["f"]):
            try:
                outcomes.append(f(x).tolist())
            except (AttributeError, KeyError, TypeError, ValueError) as e:
                outcomes.append(type(e).__name__)
        assert outcomes[0] == outcomes[1], f"call {n}, after {changes}, of\n{text}"
    assert pg.stats(recorded).replayed >= 2, pg.explain(recorded)
