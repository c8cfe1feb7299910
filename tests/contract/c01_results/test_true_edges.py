"""A graph in which only those nodes wait for each other that share memory gives the same. (The CPU runs its operators one after
the other in any case.)"""

import copy
from itertools import pairwise

import pytest
import torch

import phonograph as pg
from phonograph.devices.cuda import laned
from phonograph.devices.cuda.laned import LanedProgram


@pytest.fixture
def wired_anew(monkeypatch):
    """Each graph that can be is wired anew, however slow that is."""
    monkeypatch.setattr(laned, "LANES", (3,))
    monkeypatch.setattr(laned, "_NOISE", 1e-9)
    monkeypatch.setattr(laned, "_SHORTER", 1.01)


def recorded(function, **options):
    return pg.record(function, edges="true", keep="always", **options)


def found(function):
    """What the trials of a function's programs have come to; on the CPU there are none."""
    programs = [player.recording.program for player in function._shelf]
    return [program.edges for program in programs if isinstance(program, LanedProgram)]


def assert_wired_anew(device, function):
    assert device.type == "cpu" or ({one.partition(":")[0] for one in found(function)} == {"true"})


def mlp(*sizes):
    layers = []
    for i, o in pairwise(sizes):
        layers += [torch.nn.Linear(i, o), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1])


class Update:
    """An update of an actor and a critic that share nothing but the loss."""

    def __init__(self, device, rate=1e-2):
        torch.manual_seed(0)
        self.actor, self.critic = mlp(17, 64, 64, 6).to(device), mlp(17, 64, 64, 1).to(device)
        self.params = [*self.actor.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(self.params, lr=rate, fused=True)

    def __call__(self, x, a):
        self.optimizer.zero_grad()
        policy = ((self.actor(x) - a) ** 2).mean()
        value = ((self.critic(x).squeeze(1) - a.sum(1)) ** 2).mean()
        loss = policy + 0.5 * value
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.params, 0.5)
        self.optimizer.step()
        return loss.detach(), policy.detach()


def same(update, other):
    return all(map(torch.equal, update.params, other.params))


def test_c01_an_update_with_true_edges_is_that_of_eager(device, wired_anew):
    ours, theirs = Update(device), Update(device)
    play, kept = recorded(ours), []
    for _ in range(12):
        x, a = torch.randn(64, 17, device=device), torch.randn(64, 6, device=device)
        kept.append((play(x, a), theirs(x, a)))
    for one, other in kept:  # results that are held keep their values
        assert all(map(torch.equal, one, other))
    assert same(ours, theirs)
    assert_wired_anew(device, play)


def test_c01_a_rate_that_changes_is_set_in_the_graph_that_is_launched(device, wired_anew):
    ours, theirs = Update(device), Update(device)
    play = recorded(ours)
    for n in range(8):
        x, a = torch.randn(64, 17, device=device), torch.randn(64, 6, device=device)
        for each in (ours, theirs):
            each.optimizer.param_groups[0]["lr"] = 1e-2 / (n + 1)
        play(x, a)
        theirs(x, a)
        assert same(ours, theirs)
    assert_wired_anew(device, play)


def test_c01_a_trial_changes_nothing_outside(device, wired_anew):
    """It runs the graph some twenty times, of which nobody has asked for any."""
    count, rows = torch.zeros((), dtype=torch.int64, device=device), torch.zeros(8, 4, device=device)

    def step(x):
        rows.index_copy_(0, count.view(1), x.sum(0, keepdim=True))  # out of bounds after eight
        count.add_(1)
        return (x * 2).sum(), (x * 3).sum()

    play = recorded(step)
    for n in range(8):
        twice, thrice = play(torch.full((3, 4), float(n), device=device))
        assert (twice.item(), thrice.item()) == (24 * n, 36 * n)
    assert count.item() == 8
    assert rows[:, 0].tolist() == [3.0 * n for n in range(8)]
    assert_wired_anew(device, play)


def test_c01_memory_that_is_used_again_is_waited_for(device, wired_anew):
    """Both branches sort, in temporary memory of the operator's own."""
    kept = torch.randn(4, 2048, device=device)

    def step(x):
        a, b = (kept * x).sort().values, (kept + x).sort().values
        return a.cumsum(1), b.cumsum(1), kept.mul_(0.5).sum()

    before = kept.clone()
    play = recorded(step)
    for n in range(6):
        x = torch.randn(4, 1, device=device)
        a, b, total = play(x)
        assert torch.equal(a, (before * x).sort().values.cumsum(1))
        assert torch.equal(b, (before + x).sort().values.cumsum(1))
        before.mul_(0.5)
        assert torch.equal(total, before.sum()), n
    assert_wired_anew(device, play)


def test_c01_products_of_matrices_of_one_handle_keep_their_order(device, wired_anew):
    """They share a workspace, which some of them work in."""
    weights = [torch.randn(256, 256, device=device, dtype=torch.float64) for _ in range(6)]

    def step(x):
        rows = [x @ w for w in weights]
        return torch.stack([row @ w for row, w in zip(rows, reversed(weights), strict=True)]).sum(0)

    play = recorded(step)
    for _ in range(10):
        x = torch.randn(8, 256, device=device, dtype=torch.float64)
        assert torch.equal(play(x), step(x))
    assert_wired_anew(device, play)


def test_c01_a_graph_that_gives_something_else_is_not_used(cuda, wired_anew, monkeypatch, caplog):
    """Nodes are said to touch nothing."""
    monkeypatch.setattr(laned, "dependencies", lambda nodes: [])
    monkeypatch.setattr(laned, "unordered", lambda nodes, edges: iter(()))
    monkeypatch.setattr(laned, "_LITTLE", 1 << 40)

    def step(x):  # (in another order a cumsum waits for ever)
        for _ in range(40):
            x = x * 1.01
        return x

    play = recorded(step)
    for _ in range(4):
        x = torch.randn(1 << 20, device=cuda)
        assert torch.equal(play(x), step(x))
    assert found(play)
    assert "3 lanes differ" in found(play)[0]
    caplog.clear()  # which is a failure of our own


def test_c01_a_graph_that_would_take_too_much_memory_takes_what_a_chain_does(cuda, wired_anew, monkeypatch):
    monkeypatch.setattr(laned, "_LITTLE", 0)

    def step(x):
        for _ in range(20):
            x = x * 1.5 - 1
        return x.sum()

    play, chain = recorded(step), pg.record(step, keep="always")
    for _ in range(4):
        x = torch.randn(1 << 20, device=cuda)
        assert torch.equal(play(x), step(x))
        assert torch.equal(chain(x), step(x))
    assert_wired_anew(cuda, play)
    (ours,), (theirs,) = play._shelf, chain._shelf
    assert ours.recording.footprint.nbytes < theirs.recording.footprint.nbytes + (16 << 20)  # and not 160 MiB


@pytest.mark.parametrize("draws", [False, True])
def test_c01_what_draws_random_numbers_is_a_chain(device, draws, wired_anew):
    """So far: its launch goes through torch."""
    net = copy.deepcopy(mlp(8, 8, 1)).to(device)

    def step(x):
        return net(torch.nn.functional.dropout(x, 0.5, training=draws)).sum(), (x * 2).sum()

    play = recorded(step)
    with torch.no_grad():
        for seed in range(4):
            x = torch.randn(4, 8, device=device)
            torch.manual_seed(seed)
            one = play(x)
            torch.manual_seed(seed)
            assert all(map(torch.equal, one, step(x)))
    assert device.type == "cpu" or len(found(play)) == (not draws)


@pytest.mark.parametrize("edges", ["true", "captured"])
def test_c01_explain_says_which_edges_a_graph_has(device, edges, wired_anew):
    """Where somebody has asked for others. The CPU has no graphs."""
    play = pg.record(lambda x: ((x * 2).sum(), (x * 3).sum()), edges=edges, keep="always")
    for _ in range(4):
        play(torch.ones(3, device=device))
    assert ("edges of its graph: true: " in pg.explain(play)) == (device.type == "cuda" and edges == "true")


def test_c01_a_chain_says_why_it_is_one(cuda, wired_anew):
    play = recorded(lambda x: (torch.nn.functional.dropout(x), x.sum()))
    for _ in range(3):
        play(torch.ones(3, device=cuda))
    assert "edges of its graph: as captured: it draws random numbers" in pg.explain(play)


def test_c01_edges_are_of_one_of_two_kinds():
    with pytest.raises(ValueError, match="edges must be one of 'captured', 'true', not 'all'"):
        pg.record(lambda x: x, edges="all")


@pytest.mark.parametrize("waits", [True, False])
def test_c01_a_wait_that_was_forgotten_in_somebodys_graph_is_named(cuda, waits):
    x, y = torch.ones(1 << 10, device=cuda), torch.ones(1 << 10, device=cuda)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with pg.check_graphs() as found, torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            x.mul_(2)
        if waits:
            main.wait_stream(side)
        y.add_(x)
        main.wait_stream(side)
    (order,) = found
    assert (order.nodes, order.unknown) == (2, 0)
    assert [race.nbytes for race in order.races] == ([] if waits else [4 << 10])


@pytest.mark.parametrize("noise", [1e-9, 1e9])
def test_c01_a_replay_after_the_trial_has_its_own_arguments(device, wired_anew, monkeypatch, noise):
    """Whichever graph is launched then: it has been launched in the trial, with those of that call."""
    monkeypatch.setattr(laned, "_NOISE", noise)
    xs = [torch.randn(64, device=device) for _ in range(2)]

    def step(x):
        return (x * 2).sum(), (x * 3).cumsum(0)

    play = recorded(step)
    for n in (0, 0, 1, 0, 1, 1, 0):  # captured with the one, tried with the other
        assert all(map(torch.equal, play(xs[n]), step(xs[n])))
