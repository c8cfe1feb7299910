"""C8, C9: what a replay relies on is looked at by the helper in C, or by Python: either hears of the same changes."""

import sys

import pytest
import torch
from torch import nn

import phonograph as pg
from phonograph._torch import native
from phonograph.testing import assert_same
from tests.helpers import may_run_live

FACTOR = 2.0


@pytest.fixture(params=["C", "Python"])
def helper(request, monkeypatch):
    """Who looks."""
    if request.param == "C" and native.instead:
        pytest.skip(f"the helper in C: {native.instead}")
    if request.param == "Python":
        monkeypatch.setattr(native, "_native", None)
    return request.param


class Run:
    """A training step that reads a global variable, a list and a model with buffers."""

    def __init__(self, device, record):
        torch.manual_seed(1)
        self.device, self.scale = device, [3.0]
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.inputs = [torch.randn(6, 4, device=device) for _ in range(4)]

        def step(x):
            self.optimizer.zero_grad()
            loss = (self.model(x) * self.scale[0] * FACTOR).square().mean()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        self.step = pg.record(step, keep="always") if record else step

    @property
    def weight(self):
        return self.model[0].weight

    @property
    def mean(self):
        return self.model[1].running_mean

    def tensor(self, *shape, value=0.5, **options):
        return torch.full(shape, value, device=self.device, **options)

    def state(self):
        return [t.detach().clone() for t in self.model.state_dict().values()]


CHANGES = {}


def change(function):
    CHANGES[function.__name__] = function
    return function


@change
def nothing(run):
    pass


@change
def learning_rate(run):
    run.optimizer.param_groups[0]["lr"] = 0.5


@change
def item_of_a_list(run):
    run.scale[0] = 4.0


@change
def weight_has_other_memory(run):
    run.weight.data = run.tensor(8, 4)


@change
def weight_has_other_memory_past_the_witness(run):
    torch._C.TensorBase.data.__set__(run.weight, run.tensor(8, 4))


@change
def gradient_is_none(run):
    run.weight.grad = None


@change
def gradient_is_read(run):
    run.weight.grad.sum()


@change
def state_is_read(run):
    _ = run.optimizer.state[run.weight]["exp_avg"]


@change
def state_is_loaded(run):
    run.optimizer.load_state_dict(run.optimizer.state_dict())


@change
def evaluation(run):
    run.model.eval()


@change
def weight_is_another(run):
    run.model[0].weight = nn.Parameter(run.tensor(8, 4))


@change
def buffer_is_another(run):
    run.model[1].running_mean = run.tensor(8)


@change
def buffer_has_other_memory(run):
    run.mean.data = run.tensor(8)


@change
def buffer_is_set(run):
    run.mean.set_(run.tensor(8))


@change
def buffers_are_swapped(run):
    torch.utils.swap_tensors(run.model[1].running_mean, run.tensor(8))


@change
def storage_of_a_weight_is_larger(run):
    run.weight.untyped_storage().resize_(4096)


@change
def storage_of_a_buffer_is_larger(run):
    run.mean.untyped_storage().resize_(4096)


@change
def buffer_is_copied_lazily(run):
    run.kept = torch._lazy_clone(run.mean)


@change
def weight_is_frozen(run):
    run.weight.requires_grad_(False)


@change
def hook_of_a_module(run):
    run.model[0].register_forward_hook(lambda module, args, result: result * 2)


@change
def hook_of_a_parameter(run):
    run.weight.register_hook(lambda gradient: gradient * 2)


@change
def parameter_group(run):
    run.optimizer.add_param_group({"params": [nn.Parameter(run.tensor(2))]})


@change
def deterministic(run):
    torch.use_deterministic_algorithms(True)


@change
def buffers_of_other_types(run):
    run.model[1].double().float()


@may_run_live
@pytest.mark.parametrize("done", CHANGES.values(), ids=CHANGES)
def test_c08_a_change_is_heard_by_the_helper_and_by_python(device, helper, done):
    ours, live = Run(device, True), Run(device, False)
    try:
        for _ in range(2):
            compare(ours, live, 12)
            for run in (ours, live):
                done(run)
                torch.use_deterministic_algorithms(False)
            compare(ours, live, 3)
    finally:
        torch.use_deterministic_algorithms(False)
    assert pg.stats(ours.step).replayed >= 12, pg.explain(ours.step)


def compare(ours, live, steps):
    for i in range(steps):
        x = live.inputs[i % len(live.inputs)]
        assert_same(ours.step(x), live.step(x))
    assert_same(ours.state(), live.state())


@may_run_live
def test_c09_a_global_variable_is_heard_by_the_helper_and_by_python(device, helper, monkeypatch):
    ours, live = Run(device, True), Run(device, False)
    compare(ours, live, 12)
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    compare(ours, live, 3)


@may_run_live
@pytest.mark.parametrize("kind", ["shape", "strides", "alignment", "gradient", "attribute", "parameter"])
def test_c07_an_argument_of_another_kind_is_heard_by_the_helper_and_by_python(device, helper, kind):
    others = {
        "shape": lambda x: x[:3].clone(), "strides": lambda x: x.t().contiguous().t(), "parameter": nn.Parameter,
        "gradient": lambda x: x.clone().requires_grad_(),
        "alignment": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(6, 4),
    }  # fmt: skip
    ours, live = Run(device, True), Run(device, False)
    compare(ours, live, 12)
    x = live.inputs[2]
    if kind == "attribute":
        x.mark = 1
    else:
        x = others[kind](x)
    for _ in range(2):
        assert_same(ours.step(x), live.step(x))
    compare(ours, live, 3)


@pytest.mark.skipif(bool(native.instead), reason=f"the helper in C: {native.instead}")
def test_c22_a_steady_replay_asks_python_of_no_tensor(device):
    """However many there are. (An audit runs the step live once, and autograd notes something then.)"""
    run = Run(device, True)
    for _ in range(16):
        run.step(run.inputs[0])
    (player,) = run.step._shelf
    constants = player.recording.table.constants
    laps = [next(rounds) for rounds in constants._laps.values() for _ in range(8)]
    questions = [constants._alike, *(same for same, _ in laps)]
    before = [same.asked for same in questions]
    for _ in range(32):
        run.step(run.inputs[0])
    assert questions
    assert [same.asked for same in questions] == before
    assert pg.stats(run.step).replayed >= 40


def frames(function, *args):
    """How many functions written in Python a call starts."""
    started = []
    sys.setprofile(lambda frame, event, _: started.append(frame) if event == "call" else None)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return len(started)


def of_parameters(device, count):
    """The most frames of a steady replay of a step with so many parameters."""
    weights = nn.ParameterList([nn.Parameter(torch.full((4,), 0.1, device=device)) for _ in range(count)])
    optimizer = torch.optim.AdamW(weights.parameters(), lr=1e-3, fused=True)

    def step(x):
        optimizer.zero_grad()
        loss = (torch.stack([*weights]) * x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    recorded, x = pg.record(step, keep="always"), torch.ones(4, device=device)
    for _ in range(24):
        recorded(x)
    return max(frames(recorded, x) for _ in range(16))


def test_c22_a_steady_replay_runs_few_frames_however_many_parameters_there_are(device, helper):
    found = [of_parameters(device, count) for count in (13, 160)]
    assert abs(found[0] - found[1]) <= 2
    assert max(found) <= (36 if helper == "C" else 56)


class Counts:
    def __init__(self):
        self.factor = 2


def beside_a_counter(device, where):
    """The frames of a steady replay, when nothing changes beside it, and when something counts in a place of which it reads."""
    counts, weight = Counts(), torch.ones(4, device=device)

    def step(x):
        return (x * weight * counts.factor * FACTOR).sin()

    recorded, x, found = pg.record(step, keep="always"), torch.ones(4, device=device), []
    space = {"variables of the module": globals(), "attributes": vars(counts)}[where]
    for counting in (False, True):
        each = []
        for n in range(64):
            if counting:
                space["turn"] = n + 0.5
            each.append(frames(recorded, x))
        found.append(max(sorted(each[32:])[:-4]))  # (without the call that audits)
    globals().pop("turn", None)
    return found


@pytest.mark.parametrize("where", ["variables of the module", "attributes"])
def test_c22_what_counts_beside_a_step_costs_a_reading(device, where, helper):
    """The variable of a loop at the top of a script, and ``self.steps += 1``."""
    quiet, counting = beside_a_counter(device, where)
    assert counting <= quiet + 3


@pytest.mark.parametrize("where", ["variables of the module", "attributes"])
def test_c08_what_changes_after_a_long_count_beside_it_is_noticed(device, where, helper):
    """By then these places are read, and their dictionaries are not asked for versions any more."""
    counts, weight = Counts(), torch.ones(4, device=device)

    def step(x):
        return (x * weight * counts.factor * FACTOR).sin()

    recorded, x = pg.record(step, keep="always"), torch.ones(4, device=device)
    space, name = {"variables of the module": (globals(), "FACTOR"), "attributes": (vars(counts), "factor")}[where]
    was = space[name]
    try:
        for n in range(96):
            space["turn"] = n + 0.5
            if n in (48, 49, 80):
                space[name] = was + n
            assert_same(recorded(x), step(x))
    finally:
        space[name] = was
        globals().pop("turn", None)
    assert pg.stats(recorded).replayed >= 80
