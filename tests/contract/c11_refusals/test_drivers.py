"""C11: branches and loops where the driver has no conditional nodes, or not all kinds of them. (The kinds are faked.)"""

import torch
import torch.nn.functional as F

import phonograph as pg
from phonograph.cli import doctor
from phonograph.devices.cuda import conditional
from phonograph.devices.cuda.conditional import IF, SWITCH, WHILE
from tests.helpers import assert_replays, assert_settles, counts, may_run_live, plain, reasons


def has(monkeypatch, *kinds):
    monkeypatch.setattr(conditional, "kinds", lambda device: frozenset(kinds))


def test_c11_this_driver_is_asked(cuda):
    assert conditional.kinds(0) <= {IF, WHILE, SWITCH}
    assert doctor.branches(0).value == ("recorded" if WHILE in conditional.kinds(0) else "run live")


def test_c11_doctor_says_what_the_driver_can(monkeypatch):
    has(monkeypatch)
    assert (doctor.branches(0).status, doctor.branches(0).value) == ("note", "run live")
    has(monkeypatch, IF, WHILE)
    assert "12.8" in doctor.branches(0).meaning


@may_run_live
def test_c11_without_conditional_nodes_calls_run_live(cuda, monkeypatch):
    has(monkeypatch)
    branch = plain(lambda x, pred: pg.cond(pred, lambda x: x * 2, lambda x: x + 1, x))
    loop = plain(lambda x, pred: pg.repeat(3, lambda x: x * 2, x))
    for both, does in ((branch, "branches"), (loop, "loops")):
        for n in range(4):
            both(torch.ones(4, device=cuda), torch.tensor(n % 2 > 0, device=cuda))
        assert counts(both)[1:] == (0, 0)
        assert f"{does} by what a tensor holds, for which this driver has no conditional nodes" in reasons(both)


def test_c11_without_switches_each_body_has_a_node(cuda, monkeypatch):
    """The bodies may write what the index lies in."""
    has(monkeypatch, IF, WHILE)

    def f(x, i):
        def body(k):
            return lambda x: (i.add_(1), x * k + F.dropout(x, 0.1 * k))[1]

        y = pg.switch(i, [body(k) for k in range(4)], x)
        return pg.cond(y.sum() > 5, lambda y: y * 2, lambda y: y - torch.rand_like(y), y), torch.rand_like(x)

    both, x = plain(f), torch.ones(8, device=cuda)
    assert_settles(both, x, torch.tensor(1, device=cuda))
    for i in (0, 3, 2, -1, 1):
        assert_replays(both, x, torch.tensor(i, device=cuda))
