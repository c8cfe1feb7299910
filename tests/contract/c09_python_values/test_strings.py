"""C1, C3, C4, C9: strings among the arguments that are others in each call: paths, identifiers, captions. One that the call
does not read is no part of its signature; what it does with one that it reads is eager's."""

import contextlib
import json
import operator
from collections import Counter

import pytest
import torch

import phonograph as pg
from phonograph.engine import dry_run
from phonograph.testing import assert_same
from tests.helpers import may_run_live, ramp, reasons

CALLS = 40


def _batch(device, i):
    return {"x": ramp(device, 3, start=i + 1), "ids": [f"{i}-{k}" for k in range(3)], "path": f"/data/{i}.png"}


def _moved(batch, device):
    """As a loader's batch is sent to a device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {k: _moved(v, device) for k, v in batch.items()}
    return [_moved(v, device) for v in batch] if isinstance(batch, list) else batch


UNREAD = {
    "in a batch": lambda batch: batch["x"] * 2,
    "that is sent to the device": lambda batch: _moved(batch, batch["x"].device)["x"] * 2,
    "returned in its list": lambda batch: {"loss": batch["x"].sum(), "ids": batch["ids"]},
    "counted": lambda batch: batch["x"] * len(batch["ids"]),
    "gone through": lambda batch: sum(x * 2 for x, _ in zip(batch["x"], batch["ids"], strict=True)),
    "of which the kind is asked": lambda batch: batch["x"] * _is_text(batch["path"]),
    "compared with None": lambda batch: batch["x"] if batch["path"] is not None else batch["x"] * 2,
    "returned": lambda batch: (batch["path"], batch["x"] * 2),
    "returned alone": lambda batch: batch["x"].mul_(2) is None or batch["path"],
    "returned in a new list": lambda batch: ([*batch["ids"], batch["ids"][0]], batch["x"] * 2, {"of": batch["path"]}),
    "returned beside their list": lambda batch: (batch["ids"], batch["ids"][1], batch["x"] * 2),
    "taken away": lambda batch: (batch.pop("path"), batch["x"] * 3)[1],
}

READ = {
    "a branch": lambda batch: batch["x"] * (2 if batch["path"].endswith("3.png") else 3),
    "a comparison": lambda batch: batch["x"] * (batch["path"] == "/data/21.png"),
    "a length": lambda batch: batch["x"] * len(batch["path"]),
    "a table": lambda batch: batch["x"] * {"7-0": 2.0}.get(batch["ids"][0], 1.0),
    "a set": lambda batch: batch["x"] * len({*batch["ids"]}) * ("8-1" in batch["ids"]),
    "a number": lambda batch: batch["x"] * int(batch["ids"][1].split("-")[0]),
    "text": lambda batch: {f"{batch['path']}/loss": batch["x"].sum()},
    "a join": lambda batch: ("".join(batch["ids"]), batch["x"] * 2),
    "a sum": lambda batch: (batch["path"] + "x", "x" + batch["path"], batch["path"] % (), batch["x"] * 2),
    "its class": lambda batch: batch["x"] * (2 if type(batch["path"]) is str else 3),
    "a letter": lambda batch: batch["x"] * ord(batch["path"][6]),
    "json": lambda batch: (json.dumps(batch["ids"]), batch["x"] * 2),
    "a count": lambda batch: batch["x"] * Counter(batch["ids"])["9-2"],
    "a match": lambda batch: batch["x"] * _matched(batch["path"]),
    "what may not work": lambda batch: batch["x"] * _tried(batch["ids"]),
    "the order": lambda batch: batch["x"] * (max(batch["ids"]) > "2"),
}


def _is_text(x):
    return isinstance(x, str) and not hasattr(x, "to")


def _matched(path):
    match path:
        case "/data/11.png":
            return 5
        case str():
            return 2
    return 3


def _tried(ids):
    try:
        return len("".join(ids))
    except TypeError:
        return 0


def _calls(function, device, calls=CALLS, **options):
    f = pg.record(function, keep="always", **options)
    for i in range(calls):
        ours, theirs = _batch(device, i), _batch(device, i)
        found, expected = f(ours), function(theirs)
        assert_same(found, expected)
        assert_same(ours, theirs)
        if isinstance(expected, dict) and "ids" in expected:
            assert found["ids"] is ours["ids"]
    return f


@pytest.mark.parametrize("function", UNREAD.values(), ids=UNREAD)
def test_c9_a_string_that_is_not_read_is_no_part_of_the_signature(device, function):
    f = _calls(function, device)
    assert pg.stats(f).replayed >= CALLS - 5, reasons(f)
    assert pg.stats(f).recorded == 1


@may_run_live
@pytest.mark.parametrize("function", READ.values(), ids=READ)
def test_c1_a_string_that_is_read_gives_what_it_gives(device, function):
    _calls(function, device)


class _Swallows:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return True


def _joined(x, name, context):
    with context:
        return x * len(str.upper(name))  # in C, which takes strings only
    return x * 2


PAST_IT = {
    "is": lambda x, name, chosen: x * (2 if name is chosen else 3),
    "an operator": lambda x, name, chosen: x * (2 if any(operator.is_(name, one) for one in [chosen]) else 3),
    "an error that is suppressed": lambda x, name, chosen: _joined(x, name, contextlib.suppress(TypeError)),
    "an error that a context swallows": lambda x, name, chosen: _joined(x, name, _Swallows()),
}


@may_run_live
@pytest.mark.parametrize("function", PAST_IT.values(), ids=PAST_IT)
def test_c1_a_string_that_is_read_without_being_asked(device, function):
    names = [f"{10 ** (i % 3 + 3)}/{i}" for i in range(CALLS)]

    def step(x, name):
        return function(x, name, names[20])

    f = pg.record(step, keep="always")
    for name in names:
        assert_same(f(ramp(device, 3), name), step(ramp(device, 3), name))


def test_c10_an_audit_reads_the_string_itself(device, monkeypatch):
    """So whatever reads one, and nobody hears it, is found by the next audit."""
    monkeypatch.setattr(dry_run, "may_miss", lambda ran: False)

    def step(x, name):
        return _joined(x, name, contextlib.suppress(TypeError))

    f = pg.record(step, keep="always", audit=5)
    calls = [(ramp(device, 3), f"{10 ** (i % 3 + 3)}/{i}") for i in range(CALLS)]
    with pytest.warns(pg.Stale):
        assert len([f(*call) for call in calls]) == CALLS


def test_c9_a_string_that_is_read_in_some_calls_only(device):
    def step(batch, shows):
        return (f"{batch['path']}", batch["x"] * 2) if shows else batch["x"] * 3

    f = pg.record(step, keep="always")
    for i in range(60):
        batch = _batch(device, i)
        assert_same(f(batch, i % 5 == 4), step(batch, i % 5 == 4))


@may_run_live
@pytest.mark.parametrize("returns", [lambda path: None, lambda path: path, lambda path: (path, path)], ids=range(3))
def test_c9_a_string_that_a_call_keeps(device, returns):
    kept = []

    def step(batch):
        kept.append(batch["path"])
        return batch["x"] * 2, returns(batch["path"])

    f = pg.record(step, keep="always")
    for i in range(20):
        assert_same(f(_batch(device, i)), (ramp(device, 3, start=i + 1) * 2, returns(f"/data/{i}.png")))
    assert kept == [f"/data/{i}.png" for i in range(20)]
    assert {*map(type, kept)} == {str}


def test_c9_few_strings_have_a_recording_each(device):
    def step(x, mode):
        return x * 2 if mode == "train" else x * 3

    f = pg.record(step, keep="always")
    for i in range(30):
        x, mode = ramp(device, 3, start=i + 1), ("train", "validate", "test")[i % 3]
        assert_same(f(x, mode), step(x, mode))
    assert pg.stats(f).replayed >= 20, reasons(f)


@pytest.mark.parametrize("case", ["in a batch", "returned", "returned in its list"])
def test_c1_a_step_is_audited_with_the_strings_that_it_gets(device, case):
    assert pg.stats(_calls(UNREAD[case], device, audit=4)).replayed >= CALLS - 5


@pytest.mark.parametrize("case", ["in a batch", "returned", "returned in its list"])
def test_c10_a_step_is_verified_with_the_strings_that_it_gets(device, case):
    assert pg.stats(_calls(UNREAD[case], device, verify=3)).replayed >= CALLS - 5


def test_c6_a_model_hands_on_the_strings_that_it_gets(device):
    class Net(torch.nn.Linear):
        def forward(self, x, path):
            return {"y": super().forward(x), "path": path}

    net = pg.record(Net(3, 2).to(device), keep="always")
    for i in range(20):
        net.zero_grad()
        out = net(ramp(device, 3), f"/data/{i}.png")
        out["y"].sum().backward()
        assert out["path"] == f"/data/{i}.png"
        assert_same(net.weight.grad, ramp(device, 3).repeat(2, 1))
    assert pg.stats(net).replayed >= 14, reasons(net)


def test_c19_who_reads_a_string_is_told_to_do_it_outside(device):
    f = pg.record(lambda x, name: x * len(name))
    for i in range(66):
        f(ramp(device, 3), "n" * i)
    with pytest.warns(pg.RunsLive, match=r"another string of `name` nearly each time.*read the string outside"):
        f(ramp(device, 3), "n" * 66)
