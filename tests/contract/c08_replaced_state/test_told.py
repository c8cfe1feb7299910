"""C5, C6, C8, C9: what belongs to torch's objects is not looked at one by one before each replay, as whoever comes to it is
heard; and whatever is done to it between two replays is noticed before the next, as by looking at all of it.

Each change happens to a recorded training step and to its twin without phonograph. After each step, losses, weights, gradients
and the optimizer's state are the twin's, bit for bit, and what somebody has kept is what the twin has kept."""

import copy
import threading
import warnings
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph.guards import tensor_states
from phonograph.python import dict_versions as versions
from phonograph.slots import gradients as of_gradients
from phonograph.testing import Raised, assert_same
from tests.helpers import may_run_live, ramp

ADAM = partial(torch.optim.Adam, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS = {"adam": ADAM, "sgd": SGD, "fused": partial(torch.optim.AdamW, lr=0.01, fused=True)}


class Run:
    """A model, its optimizer and a training step. `kept` is what somebody keeps beside them."""

    def __init__(self, device, make, record, accumulates=False, layers=2):
        torch.manual_seed(1)
        self.model = nn.Sequential(*[nn.Linear(4, 4, device=device) for _ in range(layers)])
        self.optimizer, self.make, self.kept = make(self.model.parameters()), make, []

        def step(x):
            if not accumulates:
                self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        self.step = pg.record(step) if record else step

    @property
    def parameters(self):
        return list(self.model.parameters())

    def outcome(self, x):
        try:
            return self.step(x)
        except Exception as error:
            return Raised(error)

    def state(self):
        return (
            [p.detach().clone() for p in self.parameters],
            [None if p.grad is None else p.grad.clone() for p in self.parameters],
            copy.deepcopy(self.optimizer.state_dict()),
            [x.clone() if isinstance(x, torch.Tensor) else copy.deepcopy(x) for x in self.kept],
        )


class Twins:
    """First the one takes some steps, then the other: what the twin does would be heard as well."""

    def __init__(self, device, make, **options):
        self.device = device
        self.ours, self.live = (Run(device, make, record, **options) for record in (True, False))
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, steps=1):
        batches = [torch.randn(2, 4, generator=self.generator).to(self.device) for _ in range(steps)]
        assert_same([self.ours.outcome(x) for x in batches], [self.live.outcome(x) for x in batches])

    def compare(self):
        assert_same(self.ours.state(), self.live.state())

    def do(self, change):
        change(self.ours), change(self.live)

    def settle(self):
        """Until replays look at nothing."""
        self(8)
        assert pg.stats(self.ours.step).replayed >= 4, pg.explain(self.ours.step)


CHANGES = {}


def change(function):
    CHANGES[function.__name__] = function
    return function


@change
def gradient_is_none(run):
    run.parameters[1].grad = None


@change
def gradient_is_another(run):
    p = run.parameters[0]
    p.grad = torch.ones_like(p)


@change
def gradient_is_zeros(run):
    p = run.parameters[0]
    p.grad = torch.zeros_like(p)


@change
def gradient_is_deleted(run):
    del run.parameters[0].grad


@change
def gradient_is_set_by_name(run):
    setattr(run.parameters[0], "grad", None)  # noqa: B010


@change
def zero_grad_to_none(run):
    run.optimizer.zero_grad(set_to_none=True)


@change
def zero_grad_to_zeros(run):
    run.optimizer.zero_grad(set_to_none=False)


@change
def modules_zero_grad(run):
    run.model.zero_grad()


@change
def live_step(run):
    run.optimizer.step()


@change
def live_backward(run):
    run.model(torch.ones(2, 4, device=run.parameters[0].device)).sum().backward()


@change
def live_backward_without_gradients_before(run):
    run.optimizer.zero_grad()
    live_backward(run)


@change
def live_backward_that_makes_new_gradients(run):
    loss = run.model(torch.ones(2, 4, device=run.parameters[0].device)).square().sum()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss.backward(create_graph=True)


@change
def live_backward_on_another_thread(run):
    thread = threading.Thread(target=live_backward_without_gradients_before, args=(run,))
    thread.start()
    thread.join()


@change
def gradients_are_clipped(run):
    torch.nn.utils.clip_grad_norm_(run.parameters, 0.01)


@change
def gradient_is_scaled_in_place(run):
    for p in run.parameters:
        p.grad.mul_(3)


@change
def gradient_has_other_memory(run):
    p = run.parameters[0]
    p.grad.data = torch.full_like(p, 2.0)


@change
def gradients_are_kept(run):
    run.kept += [p.grad for p in run.parameters]


@change
def view_of_a_gradient_is_kept(run):
    run.kept.append(run.parameters[0].grad.view(-1)[1:])


@change
def gradient_is_swapped(run):
    a, b = run.parameters[0], nn.Parameter(torch.ones_like(run.parameters[0]))
    torch.utils.swap_tensors(a, b)
    run.model[0].weight.data = run.model[0].weight.data.clone()


@change
def module_goes_to_double_and_back(run):
    run.model.double().float()


def momentum(run, i=0):
    """What the optimizer remembers of a parameter: its name, and the dictionary it is in."""
    state = run.optimizer.state[run.parameters[i]]
    return next(name for name, x in state.items() if isinstance(x, torch.Tensor) and x.dim()), state


@change
def momentum_is_another(run):
    name, state = momentum(run)
    state[name] = torch.ones_like(state[name])


@change
def momentum_is_zeroed_in_place(run):
    name, state = momentum(run)
    state[name].zero_()


@change
def momentum_has_other_memory(run):
    name, state = momentum(run)
    state[name].data = torch.full_like(state[name], 2.0)


@change
def momentum_of_one_parameter_is_deleted(run):
    del run.optimizer.state[run.parameters[1]]


@change
def momentum_of_one_parameter_is_cleared(run):
    run.optimizer.state[run.parameters[1]].clear()


@change
def all_momenta_are_cleared(run):
    run.optimizer.state.clear()


@change
def state_is_a_new_dictionary(run):
    run.optimizer.state = defaultdict(dict)


@change
def state_is_a_new_dictionary_past_the_attribute(run):
    vars(run.optimizer)["state"] = defaultdict(dict)


@change
def state_is_a_copy(run):
    run.optimizer.state = defaultdict(dict, {p: dict(s) for p, s in run.optimizer.state.items()})


@change
def state_is_loaded(run):
    saved = copy.deepcopy(run.optimizer.state_dict())
    for state in saved["state"].values():
        for x in state.values():
            if isinstance(x, torch.Tensor) and x.dim():
                x.fill_(0.5)
    run.optimizer.load_state_dict(saved)


@change
def state_is_loaded_and_kept(run):
    run.kept.append(copy.deepcopy(run.optimizer.state_dict()["state"]))
    run.optimizer.load_state_dict(run.optimizer.state_dict())


@change
def a_group_is_added(run):
    if len(run.optimizer.param_groups) == 1:
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones_like(run.parameters[0]))], "lr": 0.5})


@change
def learning_rate_is_another(run):
    run.optimizer.param_groups[0]["lr"] *= 0.5


@change
def step_counts_begin_again(run):
    for state in run.optimizer.state.values():
        if "step" in state:
            state["step"].zero_()


@change
def another_optimizer_steps(run):
    torch.optim.SGD(run.parameters, lr=0.1).step()


@change
def the_state_is_only_looked_at(run):
    run.kept.append(
        float(sum(x.sum() for s in run.optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)))
    )


@may_run_live
@pytest.mark.parametrize("accumulates", [False, True], ids=["zeroes", "accumulates"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("done", CHANGES.values(), ids=CHANGES)
def test_c08_a_change_between_two_replays_is_noticed(device, done, optimizer, accumulates):
    twins = Twins(device, optimizer, accumulates=accumulates)
    twins.settle()
    twins.do(done)
    twins(3)
    twins.compare()
    twins(6)
    twins.do(done)
    twins(1)
    twins.compare()


@may_run_live
def test_c05_a_gradient_that_was_kept_long_ago_keeps_its_value(device):
    """Nobody comes to gradients any more while it is kept."""
    twins = Twins(device, SGD)
    twins.settle()
    twins.do(gradients_are_kept)
    twins(6)
    twins.compare()
    twins.do(lambda run: run.kept.clear())
    before = pg.stats(twins.ours.step).replayed
    twins(4)
    twins.compare()
    assert pg.stats(twins.ours.step).replayed > before


def test_c06_a_kept_gradient_that_a_step_adds_to_may_get_other_memory_later(device):
    twins = Twins(device, SGD, accumulates=True)
    twins.settle()
    twins.do(gradients_are_kept)
    twins(4)

    def elsewhere(run):
        run.kept[0].data = torch.full_like(run.kept[0], 2.0)

    twins.do(elsewhere)
    twins(3)
    twins.compare()


@pytest.mark.parametrize("kept", ["state of a parameter", "state", "saved"])
def test_c08_a_state_that_was_taken_out_long_ago_may_be_changed_later(device, kept):
    """Nobody comes to the optimizer any more when it is."""
    twins = Twins(device, ADAM)
    twins.settle()
    taken = {}

    def take(run):
        if kept == "state of a parameter":
            taken[run] = [run.optimizer.state[run.parameters[0]]]
        elif kept == "state":
            taken[run] = run.optimizer.state
        else:  # which is made of the very dictionaries
            taken[run] = run.optimizer.state_dict()["state"]

    def change(run):
        state = next(iter(taken[run].values())) if isinstance(taken[run], dict) else taken[run][0]
        state["exp_avg"] = torch.ones_like(state["exp_avg"])

    twins.do(take)
    twins(5)
    for _ in range(2):
        twins.do(change)
        twins(4)
        twins.compare()


def test_c08_a_tensor_of_the_state_that_somebody_has_is_written_in_place(device):
    twins = Twins(device, ADAM)
    twins.settle()
    taken = {run: run.optimizer.state[run.parameters[0]] for run in (twins.ours, twins.live)}
    tensors = {run: (state["exp_avg"], state["step"]) for run, state in taken.items()}
    taken.clear()
    twins(5)
    twins.do(lambda run: [t.fill_(3) for t in tensors[run]])
    twins(3)
    twins.compare()


def test_c08_other_memory_of_a_momentum_that_was_taken_out_long_ago_is_noticed_within_some_calls(device):
    """The tensor in its place is the same, and nobody comes for it any more."""
    twins = Twins(device, SGD)
    twins.settle()
    before = pg.stats(twins.ours.step).recorded
    name, state = momentum(twins.ours)
    taken = state[name]
    del state
    twins(3)
    taken.data = taken.data.clone()
    for _ in range(8):
        twins.ours.step(torch.ones(2, 4, device=device))
    assert pg.stats(twins.ours.step).recorded > before


def test_c08_an_optimizer_that_keeps_its_state_elsewhere_is_looked_at(device):
    class Elsewhere(torch.optim.SGD):
        @property
        def state(self):
            return self.__dict__["elsewhere"]

        @state.setter
        def state(self, state):
            self.__dict__["elsewhere"] = state

    twins = Twins(device, partial(Elsewhere, lr=0.1, momentum=0.9))
    twins.settle()
    for done in (momentum_is_another, momentum_of_one_parameter_is_deleted, state_is_a_new_dictionary):
        twins.do(done)
        twins(4)
        twins.compare()


@may_run_live
def test_c06_a_result_that_is_a_gradient_is_held_by_whoever_keeps_it(device):
    """It comes to them by no attribute."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.ones(3, device=device))

    @pg.record
    def step(x):
        p.grad = None
        (p * x).sum().backward()
        return p.grad

    kept = [step(torch.full((3,), float(i), device=device)) for i in range(8)]
    assert [k.tolist() for k in kept] == [[float(i)] * 3 for i in range(8)]


@may_run_live
def test_c06_a_plain_tensor_that_is_optimized_has_no_attribute_that_tells(device):
    """`torch.Tensor.grad` is torch's own: gradients of such leaves are looked at each time."""

    def make(record):
        w = torch.ones(3, device=device, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)

        def step(x):
            optimizer.zero_grad()
            (w * x).square().sum().backward()
            optimizer.step()

        return w, pg.record(step) if record else step

    (ours, recorded), (theirs, live) = make(True), make(False)
    kept = []
    for i in range(12):
        x = torch.full((3,), 0.1 * i, device=device)
        recorded(x), live(x)
        assert_same(ours.grad, theirs.grad)
        if i == 7:
            kept.append((ours.grad, ours.grad.clone()))
        if i == 9:
            ours.grad = theirs.grad = None
    assert_same(*kept[0])
    assert_same(ours.detach(), theirs.detach())
    assert pg.stats(recorded).replayed > 5


class Looks:
    """Counts how many values replays look at."""

    def __init__(self, monkeypatch):
        self.count = 0
        for module, name in (
            (of_gradients, "gradient"), (of_gradients, "use_count"), (of_gradients, "address"), (tensor_states, "address")
        ):  # fmt: skip
            monkeypatch.setattr(module, name, self._counting(getattr(module, name)))

    def _counting(self, function):
        def counting(*args):
            self.count += 1
            return function(*args)

        return counting

    def over(self, recorded):
        for player in recorded._shelf:
            constants = player.recording.table.constants
            for name in ("_read_hot", "_alike"):
                setattr(constants, name, self._sizing(getattr(constants, name)))

    def of(self, recorded, x):
        self.count = 0
        recorded(x)
        return self.count

    def _sizing(self, function):
        def sizing(*args):
            found = function(*args)
            self.count += len(args[0] if args else found)
            return found

        return sizing


@pytest.mark.parametrize("optimizer", [SGD, OPTIMIZERS["fused"]], ids=["sgd", "fused"])
def test_c08_how_much_a_replay_looks_at_does_not_grow_with_parameters(device, monkeypatch, optimizer):
    found = {}
    for layers in (40, 80, 200):  # above so many parameters that are all looked at (`FEW`)
        with monkeypatch.context() as patched:
            looks = Looks(patched)
            twins = Twins(device, optimizer, layers=layers)
            twins.settle()
            x = torch.ones(2, 4, device=device)
            for _ in range(3):
                twins.ours.step(x)
            looks.over(twins.ours.step)
            found[layers] = max(looks.of(twins.ours.step, x) for _ in range(40))
    assert found[200] < 2 * found[40], found  # (what takes turns is not of one size)


def with_a_plain_leaf(device, layers):
    """A step of a model, and of a temperature beside it that is a tensor and no parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4, device=device) for _ in range(layers)])
    temperature = torch.zeros(1, device=device, requires_grad=True)
    optimizers = SGD(model.parameters()), SGD([temperature])

    def step(x):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = (model(x) * temperature.exp()).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    return model, temperature, step


def test_c08_a_leaf_that_is_no_parameter_does_not_have_all_gradients_looked_at(device, monkeypatch):
    found = {}
    for layers in (240, 480):
        with monkeypatch.context() as patched:
            looks = Looks(patched)
            _, _, step = with_a_plain_leaf(device, layers)
            recorded, x = pg.record(step, keep="always", audit=0), ramp(device, 2, 4)
            for _ in range(10):
                recorded(x)
            looks.over(recorded)
            found[layers] = max(looks.of(recorded, x) for _ in range(40))
    assert found[480] < 1.5 * found[240], found


@may_run_live
@pytest.mark.parametrize("of", ["leaf", "parameter"])
@pytest.mark.parametrize("done", ["none", "another", "other memory", "kept"])
def test_c08_gradients_of_a_plain_leaf_and_of_a_parameter_beside_it_change(device, of, done):
    outcomes = []
    for on in (True, False):
        model, temperature, step = with_a_plain_leaf(device, 3)
        recorded, t, kept, losses = pg.record(step) if on else step, temperature if of == "leaf" else model[1].weight, [], []
        for n in range(16):
            losses.append(recorded(ramp(device, 2, 4, start=n) / 8))
            if n in (8, 12):
                if done == "none":
                    t.grad = None
                elif done == "another":
                    t.grad = torch.ones_like(t)
                elif done == "other memory":
                    t.grad.data = torch.full_like(t.grad, 2.0)
                else:
                    kept.append(t.grad)
        outcomes.append([losses, t.grad.clone(), [p.detach() for p in model.parameters()], temperature.detach(), kept])
        assert not on or pg.stats(recorded).replayed > 4, pg.explain(recorded)
    assert_same(*outcomes)


class Settings:
    scale = 2.0


@pytest.mark.parametrize("changed", ["global", "object", "class", "group", "nothing"])
def test_c09_what_dictionaries_hold_is_read_only_where_one_has_changed(device, monkeypatch, changed):
    if not versions._heard:
        pytest.skip("not every change of a dictionary is heard here")
    model = nn.Linear(4, 4, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = Settings()
    settings.offset, settings.other = 1.0, 0
    monkeypatch.setitem(globals(), "FACTOR", 1.0)

    def step(x):
        optimizer.zero_grad()
        loss = (model(x) * settings.scale + settings.offset).square().mean() * FACTOR  # noqa: F821
        loss.backward()
        optimizer.step()
        return loss.detach()

    recorded, x = pg.record(step, audit=0), torch.ones(2, 4, device=device)
    for _ in range(8):
        recorded(x)
    (player,) = recorded._shelf
    constants, read = player.recording.table.constants, []
    told = {id(entry) for entries in constants._told for entry in entries}
    unchanged = constants.unchanged
    monkeypatch.setattr(constants, "unchanged", lambda entry: (read.append(id(entry)), unchanged(entry))[1])
    for n in range(6):  # equal values in the place of equal ones are no change
        if changed == "global":
            globals()["FACTOR"] = float("1.0")
        elif changed == "object":
            settings.offset = float("1.0")
        elif changed == "class":
            Settings.scale = float("2.0")
        elif changed == "group":
            optimizer.param_groups[0]["nesterov"] = [False][n * 0]
            optimizer.param_groups[0]["unknown"] = None
            del optimizer.param_groups[0]["unknown"]
        recorded(x)
    replayed = pg.stats(recorded).replayed
    assert pg.stats(recorded).recorded == 1
    assert replayed >= 12
    looked_at = [entry for entry in read if entry in told]
    assert len(looked_at) == 0 if changed == "nothing" else 0 < len(looked_at) < 6 * len(told) / 2
    settings.offset = 3.0
    assert_same(recorded(x), step(x))


def test_c08_a_long_list_that_is_another_where_something_else_has_changed_as_well(device):
    """It is equal at first, and what else was another is as before when one of its tensors is not."""
    held = SimpleNamespace(weights=[torch.full((3,), float(n), device=device) for n in range(40)])
    config = [1.0]
    f = pg.record(lambda x: (x + sum(held.weights)) * config[0], keep="always")
    for n in range(16):
        if n == 8:
            held.weights, config[0] = list(held.weights), 2.0
        if n == 9:
            held.weights[3], config[0] = torch.full((3,), 1000.0, device=device), 1.0
        x = ramp(device, 3, start=n)
        assert_same(f(x), (x + sum(held.weights)) * config[0])
    assert pg.stats(f).replayed >= 10, pg.explain(f)


def test_c09_counts_that_begin_anew(device):
    """RAdam takes another branch then, and what the one before works out is no number."""
    found = []
    for on in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(3, 2).to(device)
        opt = torch.optim.RAdam(net.parameters(), lr=0.01, foreach=True)

        def step(x, net=net, opt=opt):
            opt.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        step = pg.record(step, keep="always") if on else step
        losses = []
        for n in range(30):
            if n == 15:
                for state in opt.state.values():
                    state["step"].zero_()
            losses.append(step(torch.randn(3, 3, device=device)))
        found.append([*losses, *map(torch.detach, net.parameters())])
    assert_same(*found)
    assert pg.stats(step).replayed >= 15, pg.explain(step)


@pytest.mark.parametrize("reads", [lambda d: 2.0 + d.get("b", 0), lambda d: 2.0 + len(d)], ids=["an item", "how many"])
@pytest.mark.parametrize("before", [{}, {"a": 1}], ids=["empty", "emptied"])
def test_c09_an_empty_dictionary_is_filled_from_another(device, before, reads):
    settings = {**before}
    step = pg.record(lambda x: x * reads(settings), keep="always")
    for turn in range(9):
        if turn == 3:
            settings.clear()
        if turn == 6:
            settings.update(b=3.0)
        assert_same(step(ramp(device, 3)), ramp(device, 3) * reads(settings))
    assert pg.stats(step).replayed
