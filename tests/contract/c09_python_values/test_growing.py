"""C9: objects of which Python does not say what is read of them, or that set their attributes themselves, count, log and grow
beside what a step reads: nothing is recorded anew, and what it does read, or sets, is noticed."""

import textwrap

import pytest

import phonograph as pg
from phonograph.testing import assert_same
from tests.contract.c09_python_values.test_beside_what_is_read import STEPS, assert_noticed, assert_set_again, trainer
from tests.helpers import ramp

CLASSES = """
IDLE = "idle"
class Slots:
    __slots__ = ("factor", "done", "log", "mode")
    def __init__(self): self.factor, self.done, self.log, self.mode = 2.0, 0, [], "idle"
@dataclasses.dataclass(slots=True)
class Fields:
    factor: float = 2.0
    done: int = 0
    log: list = dataclasses.field(default_factory=list)
    mode: str = "idle"
class Setting:
    def __init__(self): self.factor, self.done, self.log, self.mode = 2.0, 0, [], "idle"
    def __setattr__(self, name, value): super().__setattr__(name, value)
"""
NAMED = "factor=2.0, done=0, log=[], mode='idle'"

# How it is made, and how an entry of it is written.
KINDS = {
    "a namespace": (f"types.SimpleNamespace({NAMED})", "config.{}"),
    "slots": ("Slots()", "config.{}"),
    "a dataclass in slots": ("Fields()", "config.{}"),
    "a class that sets": ("Setting()", "config.{}"),
    "an ordered dictionary": (f"collections.OrderedDict({NAMED})", "config['{}']"),
    "a dictionary with a default": (f"collections.defaultdict(int, {NAMED})", "config['{}']"),
}
PLACES = ("attribute", "global")


def made(device, kind, where, step, *, between="pass", change="pass"):
    """Two equal trainers whose `config` is of some kind, and lies somewhere."""
    how, entry = KINDS[kind]
    name = "self.config" if where == "attribute" else "CONFIG"
    lines = [step, between, change]
    for key in ("factor", "done", "log", "mode"):
        lines = [line.replace(f"<{key}>", entry.format(key)) for line in lines]
    step, between, change = (line.replace("<all>", "config").replace("config", name) for line in lines)
    source = textwrap.dedent(f"""
        class Trainer(Base):
            def __init__(self): super().__init__(); {f"self.config = {how}" if where == "attribute" else "pass"}
            def step(self, x): {step}
            def between(self, n): {between}
            def change(self): {change}
            def now(self): return {entry.format("mode").replace("config", name)}
    """)
    source = CLASSES + ("" if where == "attribute" else f"CONFIG = {how}\n") + source
    return trainer(source, device), trainer(source, device), ramp(device, 2, 3)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_c09_growth_beside_what_is_read(device, kind, where):
    mine, plain, x = made(device, kind, where, "return self.update(x, <factor>)",
                          between="<done> += 1; <log>.append(n)", change="<factor> = 3.0")  # fmt: skip
    step = pg.record(mine.step)
    for n in range(STEPS):
        assert_same(step(x), plain.step(x))
        mine.between(n)
        plain.between(n)
    assert pg.stats(step).recorded == 1, pg.explain(step)
    mine.change()
    plain.change()
    for _ in range(2):
        assert_same(step(x), plain.step(x))


# Reads of such an object that are more than that of one entry, or are of one that nothing else names.
IN_FULL = {
    "a namespace": ("sum(vars(<all>)[k] for k in ['done'])", "getattr(<all>, 'do' + 'ne')", "(lambda c: c.done)(<all>)",
                    "float(<all> == types.SimpleNamespace(factor=2.0, done=0, log=[], mode='idle'))"),
    "slots": ("getattr(<all>, 'do' + 'ne')", "operator.attrgetter('done')(<all>)", "(lambda c: c.done)(<all>)"),
    "a dataclass in slots": ("dataclasses.asdict(<all>)['done']", "float(<all> == Fields())"),
    "a class that sets": ("getattr(<all>, 'do' + 'ne')", "vars(<all>)['done']"),
    "an ordered dictionary": ("sum(v for k, v in <all>.items() if k == 'done')", "(lambda c: c['done'])(<all>)"),
    "a dictionary with a default": ("<all>['do' + 'ne']", "<all>.get('done', 1.0)"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "read"), [(kind, read) for kind, reads in IN_FULL.items() for read in reads])
def test_c09_what_is_read_in_other_ways_is_noticed(device, kind, read):
    mine, plain, x = made(device, kind, "attribute", f"return self.update(x, <factor> + {read})", change="<done> = 5")
    assert_noticed(mine, plain, x)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", ["'idle'", "IDLE", "Slots().mode"])
def test_c09_what_is_set_to_what_it_was(device, kind, where, value):
    """A replay does not set it: it has to be what it was."""
    mine, _, x = made(device, kind, where, f"<mode> = {value}; return self.update(x)", change="<mode> = 'busy'")
    assert_set_again(mine, x)


# How a step sets an item to what it is, whose value and key come from anywhere; and where that is.
FLAG, GLOBAL, ITEM = "self.flags.get('n')", "FLAGS.get('n')", "self.items[0]"
SETS = {
    "self.flags['n'] = len(x)": FLAG, "n = 2; self.flags['n'] = n": FLAG, "self.set(2)": FLAG, "self.put('n', 2)": FLAG,
    "put(self.flags, 'n', 2)": FLAG, "self.flags.update(n=2)": FLAG, "flags = self.flags; flags['n'] = 2": FLAG,
    "self.nested['in']['n'] = len(x)": FLAG, "FLAGS['n'] = len(x)": GLOBAL,
    "self.items[0] = len(x)": ITEM,
}  # fmt: skip


@pytest.mark.parametrize("sets", SETS)
def test_c09_an_item_that_is_set_to_what_it_was(device, sets):
    source = f"""
        FLAGS = {{"n": 2}}
        def put(flags, key, value): flags[key] = value
        class Trainer(Base):
            def __init__(self):
                super().__init__()
                self.flags, self.items = {{"n": 2}}, [2, 3]
                self.nested = {{"in": self.flags}}
            def set(self, n): self.flags["n"] = n
            def put(self, key, value): self.flags[key] = value
            def step(self, x):
                {sets}
                return self.update(x)
            def change(self): FLAGS['n'] = self.flags['n'] = self.items[0] = 7
            def now(self): return {SETS[sets]}
    """
    assert_set_again(trainer(source, device), ramp(device, 2, 3))


def test_c09_items_beside_the_one_that_is_set(device):
    """By an evaluation in between."""
    source = """
        class Trainer(Base):
            def __init__(self): super().__init__(); self.last = {"accuracy": 0.0}
            def step(self, x):
                self.last["batch"] = len(x)
                return self.update(x)
            def between(self, n): self.last["accuracy"] = n / 10
    """
    mine, plain, x = trainer(source, device), trainer(source, device), ramp(device, 2, 3)
    step = pg.record(mine.step)
    for n in range(STEPS):
        assert_same(step(x), plain.step(x))
        assert_same(mine.last, plain.last)
        mine.between(n)
        plain.between(n)
    assert pg.stats(step).recorded == 1, pg.explain(step)


@pytest.mark.parametrize("past", ["vars(self)", "self.__dict__", "vars(copy.copy(self))"])
def test_c09_a_dictionary_among_all_attributes(device, past):
    """A key of it is read by the name of the attribute, and another one past that."""
    source = f"""
        class Trainer(Base):
            def __init__(self): super().__init__(); self.config = {{"factor": 2.0, "other": 1.0}}
            def step(self, x): return self.update(x, self.config["factor"] * {past}["config"]["other"])
            def change(self): self.config["other"] = 3.0
    """
    assert_noticed(trainer(source, device), trainer(source, device), ramp(device, 2, 3))


def test_c09_a_log_of_a_closure_every_third_step(device):
    source = """
        def made():
            done, losses = 0, []
            class Trainer(Base):
                def step(self, x):
                    nonlocal done
                    loss = self.update(x)
                    if done % 3 == 0: losses.append(loss)
                    done += 1
                    return loss
                def now(self): return done, losses
            return Trainer
        Trainer = made()
    """
    mine, plain, x = trainer(source, device), trainer(source, device), ramp(device, 2, 3)
    step = pg.record(mine.step)
    for _ in range(STEPS):
        assert_same(step(x), plain.step(x))
        assert_same(mine.now(), plain.now())
    assert pg.stats(step).recorded == 2, pg.explain(step)


def test_c09_an_update_of_a_dictionary(device):
    source = """
        class Trainer(Base):
            def __init__(self): super().__init__(); self.metrics = {}
            def step(self, x):
                loss = self.update(x)
                self.metrics.update(loss=loss, twice=loss * 2)
                return loss
    """
    mine, plain, x = trainer(source, device), trainer(source, device), ramp(device, 2, 3)
    step = pg.record(mine.step)
    for _ in range(8):
        assert_same(step(x), plain.step(x))
        assert_same(mine.metrics, plain.metrics)
    assert pg.stats(step).recorded == 1, pg.explain(step)


# What a step fills by two steps from a name, and what the program puts in its place in the third call.
INNER = {
    "self.log['a'].append(loss)": ("{'a': [], 'b': []}", ("['a'] = []", "['a'] = self.log['a'][:]", "['b'].append(1)")),
    "self.log[0].append(loss)": ("[[], []]", ("[0] = []", "[:] = [[], []]", ".insert(0, [])")),
    "self.log[0]['a'].append(loss)": ("[{'a': []}]", ("[0]['a'] = []", "[0] = {'a': []}", " = [{'a': []}]")),
    "[self.log[key].append(loss) for key in ('a',)]": ("collections.defaultdict(list)", (".clear()", "['b'].append(1)")),
    "self.log['a'].append(round(loss.item(), 3))": ("{'a': []}", ("['a'] = []",)),
    "self.log['a']['k'] = loss": ("{'a': {}}", ("['a'] = {}", " = {'a': {}}")),
}


@pytest.mark.parametrize(("step", "first", "change"), [(s, f, c) for s, (f, changes) in INNER.items() for c in changes])
@pytest.mark.parametrize("where", PLACES)
def test_c09_a_list_within_a_container_that_is_only_filled_is_replaced(device, where, step, first, change):
    """History that begins anew with each epoch: what is left goes to where the name leads now."""
    lines = (f"self.log = {first}", step, f"self.log{change}", "return self.log")
    setup, step, change, now = (line.replace("self.log", "LOG" if where == "global" else "self.log") for line in lines)
    source = f"""
        {setup if where == "global" else "pass"}
        class Trainer(Base):
            def __init__(self): super().__init__(); {setup if where == "attribute" else "pass"}
            def step(self, x): loss = self.update(x); {step}; return loss
            def change(self):
                global LOG
                {change}
            def now(self): {now}
    """
    mine, plain, x = trainer(source, device), trainer(source, device), ramp(device, 2, 3)
    recorded = pg.record(mine.step)
    for n in range(8):
        assert_same(recorded(x), plain.step(x))
        assert_same(mine.now(), plain.now())
        if n == 4:
            mine.change()
            plain.change()
    assert pg.stats(recorded).replayed >= 4, pg.explain(recorded)
    assert pg.stats(recorded).recorded == 1 or "append(1)" not in change, pg.explain(recorded)
