"""C3, C4, C7, C9: objects of people's own classes, functions, and dictionaries with any keys, as arguments and as results."""

import argparse
import collections
import dataclasses
import types
import weakref

import pytest
import torch

import phonograph as pg
from phonograph.testing import Pair, assert_same
from tests.contract.shared.objects import Batch
from tests.helpers import assert_replays, counts, plain, ramp, side_by_side


class Slotted:
    __slots__ = ("n", "x")

    def __init__(self, x, n):
        self.x = x
        self.n = n


class Half(Slotted):
    """Some attributes in slots, others not."""

    def __init__(self, x, n):
        super().__init__(x, n)
        self.more = [x + 1, {"deep": Batch(x + 2, "word")}]


class AttrDict(dict):
    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]

    __setattr__ = dict.__setitem__


class Itself(dict):
    """Its attributes are its items."""

    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


class Guarded:
    """Has a constructor that may not run again, and sets attributes in a way of its own."""

    def __init__(self, x, n):
        assert not hasattr(self, "x")
        self.x = x
        self.n = n

    def __setattr__(self, name, value):
        assert name in ("x", "n", "y", "total"), name
        object.__setattr__(self, name, value)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    n: int


class Store(collections.abc.MutableMapping):
    def __init__(self, parent):
        self._items = {}
        self._parent = weakref.ref(parent)

    def __getitem__(self, key):
        return self._items[key]

    def __setitem__(self, key, value):
        self._items[key] = value

    def __delitem__(self, key):
        del self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Graph:
    """As in torch_geometric: attributes are in a store, which has a weak reference back."""

    def __init__(self, x, n):
        self.__dict__["_store"] = Store(self)
        self.x, self.n = x, n

    def __getattr__(self, name):
        if name not in self.__dict__["_store"]:
            raise AttributeError(name)
        return self.__dict__["_store"][name]

    def __setattr__(self, name, value):
        self.__dict__["_store"][name] = value


class Node:
    """As in OmegaConf: a child knows its parent."""

    def __init__(self, x, n):
        self.x, self.n = x, n
        self.child = types.SimpleNamespace(parent=self, same=[self])


KINDS = {
    "object": Batch,
    "slots": Slotted,
    "slots and attributes": Half,
    "namespace": lambda x, n: types.SimpleNamespace(x=x, n=n),
    "parsed arguments": lambda x, n: argparse.Namespace(x=x, n=n),
    "dictionary with attributes": lambda x, n: AttrDict(x=x, n=n),
    "dictionary that is its attributes": lambda x, n: Itself(x=x, n=n),
    "user dictionary": lambda x, n: types.SimpleNamespace(**collections.UserDict(x=x, n=n).data),
    "own constructor": Guarded,
    "frozen dataclass with slots": Frozen,
    "store": Graph,
    "circle": Node,
}


kinds = pytest.mark.parametrize("make", list(KINDS.values()), ids=list(KINDS))


def _values(thing):
    """What is in it, without its circles."""
    return {name: getattr(thing, name) for name in ("x", "n", "y", "total", "more") if hasattr(thing, name)}


@kinds
def test_c07_an_object_that_comes_anew_in_each_call(device, make):
    recorded = pg.record(lambda b: b.x * b.n)
    for n in range(6):
        b = make(ramp(device, 3) + n, 2)
        assert_same(recorded(b), b.x * b.n)
    assert counts(recorded) == (1, 1, 5), pg.explain(recorded)
    b = make(ramp(device, 3), 3)
    assert_same(recorded(b), b.x * b.n)  # another number is another signature
    assert counts(recorded)[0] == 2


@kinds
def test_c04_an_object_as_a_result(device, make):
    recorded, results = pg.record(lambda x, n: (make(x * 2, n), x + 1)), []
    for n in range(6):
        x = ramp(device, 3) + n
        made, other = recorded(x, 2)
        assert type(made) is type(make(x, 2))
        results.append((_values(made), _values(make(x * 2, 2))))
        assert_same(other, x + 1)
        if make is Graph:
            assert made.__dict__["_store"]._parent() is made
        if make is Node:
            assert made.child.parent is made is made.child.same[0]
    for made, expected in results:  # they are the caller's
        assert_same(made, expected)
    assert counts(recorded) == (1, 1, 5), pg.explain(recorded)


@pytest.mark.parametrize("make", [m for m in KINDS.values() if m not in (Slotted, Frozen)],
                         ids=[n for n, m in KINDS.items() if m not in (Slotted, Frozen)])  # fmt: skip
def test_c03_attributes_that_are_set_are_set_for_the_caller(device, make):
    def f(b):
        b.y = b.x * b.n
        b.total = b.n + 1
        b.x.add_(1)
        return b

    recorded = pg.record(f)
    for n in range(6):
        given, other = (make(ramp(device, 3) + n, 2) for _ in range(2))
        assert recorded(given) is given
        f(other)
        assert_same(_values(given), _values(other))
        assert list(vars(given)) == list(vars(other))
    assert counts(recorded) == (1, 1, 5), pg.explain(recorded)


EDITS = {
    "set": lambda b: setattr(b, "x", b.x * 2),
    "deleted": lambda b: delattr(b, "n"),
    "swapped": lambda b: (setattr(b, "x", b.other), setattr(b, "other", b.x + 1)),
    "the same tensor twice": lambda b: (setattr(b, "y", b.x * 2), setattr(b, "z", b.y)),
    "a view": lambda b: setattr(b, "y", b.x[1:]),
    "deeper": lambda b: b.inner.items.append(b.x + 1),
    "item": lambda b: b.inner.table.update(new=b.x + 1, n=3),
    "item deleted": lambda b: b.inner.table.pop("n"),
    "list cleared": lambda b: b.inner.items.clear(),
    "new object": lambda b: setattr(b, "made", Batch(b.x * 3, [b.n])),
    "flag": lambda b: setattr(b, "done", True),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=list(EDITS))
@pytest.mark.parametrize("hold", [False, True], ids=["dropped", "held"])
def test_c03_whatever_is_done_to_an_objects_parts(device, edit, hold):
    def f(b):
        edit(b)
        return b.x.sum() if hasattr(b, "x") else None

    both = plain(f, hold=hold)
    for n in range(6):
        inner = types.SimpleNamespace(items=[ramp(device, 3)], table={"n": 1, "t": ramp(device, 2)})
        both(types.SimpleNamespace(x=ramp(device, 3) + n, other=ramp(device, 3) - n, n=2, inner=inner))
    assert counts(both) == (1, 1, 5), pg.explain(both.recorded)


def test_c03_items_that_are_set_in_dictionaries_and_lists(device):
    def f(batch, history):
        batch["y"] = batch["x"] * 2
        batch["x"] = batch["x"] + 1
        del batch["old"]
        history.append(batch["y"].sum())
        return batch

    both = plain(f, hold=True)
    for n in range(6):
        both({"x": ramp(device, 3) + n, "old": 1, "z": 2}, [])
    assert counts(both) == (1, 1, 5), pg.explain(both.recorded)


class Cache:
    def __init__(self, device):
        self.keys = torch.zeros(4, 3, device=device)
        self.name = "cache"

    def update(self, position, x):
        self.keys.index_copy_(0, position, x)
        return self.keys


def _decode(cache, position, x):
    return cache.update(position, x).sum(0)


def test_c03_an_object_that_comes_again_is_worked_on_in_place(device):
    both = plain(_decode)
    cache = Pair.of(Cache(device))
    before = cache.recorded.keys
    for n in range(8):
        both(cache, torch.tensor([n % 4], device=device), ramp(device, 1, 3) + n)
    assert counts(both) == (2, 1, 6), pg.explain(both.recorded)
    assert cache.recorded.keys is before
    (recording,) = both.recorded._shelf
    assert len(recording.recording.slots) == 2  # and none for the cache


def test_c08_what_changes_in_an_object_that_comes_again_is_noticed(device):
    both = plain(lambda c, x: (c.keys.sum() + x) * len(c.name))
    cache = Pair.of(Cache(device))
    for n in range(4):
        both(cache, ramp(device, 3) + n)
    assert_replays(both, cache, ramp(device, 3))
    for change in (lambda c: c.keys.add_(1), lambda c: setattr(c, "name", "x"), lambda c: setattr(c, "keys", c.keys + 2)):
        cache.each(change)
        for n in range(4):
            both(cache, ramp(device, 3) + n)
        assert_replays(both, cache, ramp(device, 3))


@pytest.mark.parametrize("each", [1, 2, 5])
def test_c15_batches_that_come_again_in_later_epochs_need_one_recording(device, each):
    both = plain(lambda b: b.x * b.n)
    batches = [Pair.of(Batch(ramp(device, 3) + n, 2)) for n in range(4)]
    for batch in batches * 3:
        for _ in range(each):
            both(batch)
    live, recorded, _ = counts(both)
    assert live <= 3, pg.explain(both.recorded)
    assert recorded <= 2


def test_c15_an_object_whose_tensors_are_replaced_before_each_call_is_a_batch(device):
    both = plain(lambda b: b.x * b.n)
    batch = Pair.of(Batch(ramp(device, 3), 2))
    for n in range(10):
        batch.each(lambda b, n=n: setattr(b, "x", ramp(device, 3) + n))
        both(batch)
    assert counts(both) == (1, 1, 9), pg.explain(both.recorded)


def test_c15_a_new_cache_for_each_text_is_recorded_again_if_it_is_long(device):
    both = plain(_decode)
    for length in (70, 70, 70):
        cache = Pair.of(Cache(device))
        for n in range(length):
            both(cache, torch.tensor([n % 4], device=device), ramp(device, 1, 3) + n)
    live, recorded, replayed = counts(both)
    assert (live, recorded) <= (6, 4), pg.explain(both.recorded)
    assert replayed >= 204
    assert pg.stats(both.recorded).bytes_copied < 210 * 100  # no cache
    assert len(both.recorded._shelf) <= 2  # none for a cache that is gone


def test_c15_many_short_texts_share_one_recording(device):
    both = plain(_decode)
    for _ in range(6):
        cache = Pair.of(Cache(device))
        for n in range(5):
            both(cache, torch.tensor([n % 4], device=device), ramp(device, 1, 3) + n)
    live, recorded, _ = counts(both)
    assert live <= 4, pg.explain(both.recorded)
    assert recorded <= 2


class Agent:
    def __init__(self, device):
        self.net = torch.nn.Linear(3, 1).to(device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.scale = 2.0
        self.buffer = Batch(ramp(device, 2, 3), 2)

    def update(self, batch):
        loss = (self.net(batch.x) * self.scale * batch.n).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("how", ["argument", "method", "its own buffer"])
def test_c09_an_agent_and_its_batches(device, how):
    def make():
        torch.manual_seed(0)
        agent = Agent(device)
        if how == "argument":
            return (lambda batch: recorded_update(agent, batch)), agent.net
        return agent.update, agent

    def recorded_update(agent, batch):
        return agent.update(batch)

    both = side_by_side(make)
    for n in range(8):
        if how == "its own buffer":  # which it can reach by another name as well
            both(Pair(both.state.buffer, both.live_state.buffer))
        else:
            both(Batch(ramp(device, 2, 3) + n, 2))
    assert counts(both)[2] >= 5, pg.explain(both.recorded)


def test_c09_an_agent_as_an_argument(device):
    torch.manual_seed(0)
    both = plain(lambda agent, batch: agent.update(batch))
    agent = Pair.of(Agent(device))
    for n in range(6):
        both(agent, Batch(ramp(device, 2, 3) + n, 2))
    assert counts(both) == (2, 1, 4), pg.explain(both.recorded)
    agent.each(lambda a: setattr(a, "scale", 3.0))
    for n in range(4):
        both(agent, Batch(ramp(device, 2, 3) + n, 2))
    agent.each(lambda a: assert_same(a.scale, 3.0))


def test_c07_an_object_found_by_another_name_is_not_taken_apart(device):
    """What the function asks of it must be asked of the very object."""
    last = types.SimpleNamespace(batch=None)

    def f(b):
        return b.x * 2 if b is last.batch else b.x * 3

    recorded = pg.record(f)
    for n in range(12):
        b = Batch(ramp(device, 3) + n, 2)
        last.batch = b if n % 3 == 2 else last.batch
        assert_same(recorded(b), f(b))
