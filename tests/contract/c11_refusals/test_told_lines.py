"""C11: the lines that are told of what was refused."""

import re
import types
import warnings
from pathlib import Path

import pytest
import torch

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import assert_settles, may_run_live, plain, ramp, reasons


class _Weighing:
    def __init__(self):
        self.weight = ""

    def loss(self, x):
        return x * len(self.weight)  # read here


@may_run_live
@pytest.mark.parametrize("way", ["an attribute", "a closure variable", "an item"])
def test_c12_what_changes_from_call_to_call_is_told_with_the_line_that_reads_it(device, way):
    weighing, scale, settings = _Weighing(), "", {"scale": ""}

    def by_closure(x):
        return x * len(scale)

    def by_item(x):
        return x * len(settings["scale"])

    reads, line = {
        "an attribute": (weighing.loss, _Weighing.loss.__code__.co_firstlineno + 1),
        "a closure variable": (by_closure, by_closure.__code__.co_firstlineno + 1),
        "an item": (by_item, by_item.__code__.co_firstlineno + 1),
    }[way]
    f = pg.record(reads)
    for n in range(6):
        weighing.weight = scale = settings["scale"] = "n" * n
        assert_same(f(ramp(device, 3)), ramp(device, 3) * n)
    told = pg.explain(f)
    assert re.search(rf"^changed \dx: .* \(read at {re.escape(__file__)}:{line}\)$", told, re.MULTILINE), told
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", pg.RunsLive)
        for n in range(30):
            weighing.weight = scale = settings["scale"] = "n" * n
            assert_same(f(ramp(device, 3)), ramp(device, 3) * n)
    (message,) = [str(w.message) for w in said]
    assert f"changes from call to call at {__file__}:{line} (" in message
    pg.reset(f)
    assert "changed" not in pg.explain(f)


@may_run_live
def test_c12_values_that_change_one_after_the_other_are_not_said_to_change_from_call_to_call(device):
    settings = types.SimpleNamespace(a=0.0, b=0.0, c=0.0, d=0.0, e=0.0, f=0.0, g=0.0, h=0.0, i=0.0, j=0.0, k=0.0)

    def reads(x):
        return x * (settings.a + settings.b + settings.c + settings.d + settings.e + settings.f + settings.g + settings.h
                    + settings.i + settings.j + settings.k)  # fmt: skip

    f = pg.record(reads)
    for name in vars(settings):
        setattr(settings, name, 1.0)
        for _ in range(4):
            x = ramp(device, 3)
            assert_same(f(x), reads(x))
    (reason,) = pg.stats(f).refusals
    told = r"values that it relies on have changed 9 times in quick succession, settings\.\w the last"
    assert re.fullmatch(told, reason), reason


@may_run_live
def test_c12_a_transform_of_torch_func_with_a_history_is_refused_with_a_remedy(device):
    weight = torch.ones(3, device=device, requires_grad=True)

    def slope(x):
        return torch.func.grad(lambda y: (y * weight).sin().sum())(x)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", pg.RunsLive)
        f = pg.record(slope)
        for n in range(4):
            assert_same(f(ramp(device, 3, start=n)), slope(ramp(device, 3, start=n)))
    assert any("return results detached (y.detach())" in str(w.message) for w in said), [str(w.message) for w in said]
    detached = plain(lambda x: slope(x).detach())
    assert_settles(detached, ramp(device, 3))


def test_c12_what_has_no_name_is_read_nowhere():
    used = 2.0
    f = pg.record(lambda x: x * used)
    assert f._describer.read_at("the memory that it used", None) == ""


def test_c12_signatures_that_do_not_come_again_are_explained(device):
    f = pg.record(lambda x, n: x * len(n))
    for n in range(5):
        f(ramp(device, 3), b"n" * n)
    assert "\n5 of the last 5 calls had a signature of their own: another value of `n`" in pg.explain(f)
    for n in range(5):
        f(ramp(device, 3), b"n" * n)
    assert "of their own" not in pg.explain(f)


class ByDigits(torch.optim.lr_scheduler.LRScheduler):
    """Goes by the text of a number, in which no number can be followed."""

    def get_lr(self):
        return [group["initial_lr"] / len(str(self.last_epoch)) for group in self.optimizer.param_groups]


def test_c12_who_steps_a_scheduler_inside_is_told_to_do_it_outside(device):
    net = torch.nn.Linear(2, 2).to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scheduler = ByDigits(optimizer)

    def step(x):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()
        scheduler.step()

    step = pg.record(step)
    x = torch.ones(1, 2, device=device)
    step(x)
    with pytest.warns(pg.RunsLive, match=r"last_epoch.*call the scheduler's step\(\) outside"):
        step(x)


def test_c12_a_model_that_runs_live_is_told_at_the_users_line(device):
    class Net(torch.nn.Module):
        def forward(self, x):
            return x if x.sum().item() > 0 else -x

    net = pg.record(Net(), fallback="live")
    x = torch.ones(2, device=device)
    net(x)
    with pytest.warns(pg.RunsLive) as said:
        net(x)
    assert {w.filename for w in said} == {__file__}


PACKAGE = """
def normalised(x):
    return x / x.sum().item()


def without_loops(edges):
    return edges[:, edges[0] != edges[1]]
"""


def installed(directory, name):
    """What such a module of a package has in it."""
    file, names = directory / "site-packages" / name, {}
    exec(compile(PACKAGE, str(file), "exec"), names)
    return names


@may_run_live
def test_c11_a_package_that_reads_a_number_is_to_be_called_outside(device, tmp_path):
    """Nobody is told to change code of a package; what is told works, and stands first."""
    normalised = installed(tmp_path, "averages.py")["normalised"]
    inside, outside = pg.record(lambda x: normalised(x * 2), fallback="live"), pg.record(lambda x: x * 2, fallback="live")
    for n in range(4):
        x = ramp(device, 3, start=n)
        assert_same(inside(x), normalised(outside(x)))
    assert pg.stats(inside).replayed == 0
    assert "call that outside of the recorded function" in reasons(inside)
    assert pg.stats(outside).replayed == 3


@may_run_live
def test_c11_random_numbers_of_numpys_are_told_where_they_are_drawn(device):
    """Torch has functions of the same names."""
    np = pytest.importorskip("numpy")

    def mixed(x):
        y = x + torch.zeros_like(x).normal_() * 0 + torch.empty_like(x).uniform_() * 0
        return y * np.random.beta(1.0, 1.0), torch.normal(x, 1.0) * 0  # drawn here

    f = pg.record(lambda x: mixed(x * 2))
    for _ in range(3):
        f(ramp(device, 3))
    (line,) = [n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# drawn here")]
    assert f"{__file__}:{line} " in reasons(f)


@may_run_live
def test_c11_an_argument_that_it_can_reach_as_well_is_named(device):
    held = torch.zeros(3, device=device)
    f = pg.record(lambda x, batch: held.add_(x) + batch["y"][0])
    for _ in range(3):
        f(ramp(device, 3), {"y": [held]})
    assert "gets `batch['y'][0]`, which it can reach by another name as well" in reasons(f)


@may_run_live
def test_c11_a_number_by_which_it_goes_on_is_named(device):
    state = types.SimpleNamespace(turn=0)

    def step(x):
        state.turn += 1
        return x * 2 if state.turn * 7 % 11 > 5 else x - 1

    f = pg.record(step)
    for n in range(80):
        f(ramp(device, 3, start=n))
    assert "state.turn (by which it goes on)" in reasons(f)
    assert f"(read at {__file__}:{step.__code__.co_firstlineno + 1})" in reasons(f)


@pytest.mark.parametrize("padded", [False, True], ids=["live", "not padded"])
def test_c11_a_reason_is_one_message(device, caplog, padded):
    """Who listens to the log as most programs do, and to warnings, reads of it once."""
    caplog.set_level("INFO", logger="phonograph")
    options = {"shapes": {"x": {0: [4, 8]}}} if padded else {"fallback": "live"}
    f = pg.record(lambda x: x - x.mean() if padded else x * x.sum().item(), **options)
    with pytest.warns(pg.RunsLive) as said:
        assert [f(ramp(device, n)).numel() for n in (3, 3, 5, 5)] == [3, 3, 5, 5]
    assert len(said) == 1
    assert not [line for line in caplog.messages if "live" in line or "padded" in line]


def test_c11_a_number_among_the_arguments_by_which_it_goes_on_is_named(device):
    f = pg.record(lambda x, turn: x * turn if turn * 7 % 11 > 5 else x - 1, keep="always")
    for n in range(80):
        f(ramp(device, 3), 3 * n)
    assert "changed 1x: turn (by which it goes on) (read at " in pg.explain(f)


class Normalised(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


ADVICE = ("record the model alone", 'fallback="split"')


@may_run_live
@pytest.mark.parametrize(("alone", "split"), [(False, False), (True, False), (False, True)], ids=["", "alone", "split"])
def test_c11_advice_that_was_followed_is_not_given_again(device, tmp_path, alone, split):
    normalised, net = installed(tmp_path, "averages.py")["normalised"], torch.nn.Linear(3, 3, device=device)
    f = pg.record(Normalised(normalised) if alone else lambda x: normalised(net(x)), fallback="split" if split else "live")
    if split:  # by a number that is another each time
        f = pg.record(lambda x: x + torch.full((3,), x.sum(), device=x.device), fallback="split")
    for n in range(4):
        f(ramp(device, 3, start=n))
    told = reasons(f)
    assert "reads a tensor's value on the host" in told
    assert (ADVICE[0] in told, ADVICE[1] in told) == (not alone and not split, not split)


def test_c11_a_warning_has_one_thing_to_do(device):
    """What helps most often; the others are in `explain`."""
    f = pg.record(lambda x: x / x.sum().item(), fallback="live")
    f(ramp(device, 3))
    with pytest.warns(pg.RunsLive, match=r"\(return the tensor and read it outside, or use the tensor itself\) \[PG101\]$"):
        f(ramp(device, 3, start=1))
    assert "torch.where" in reasons(f)


@may_run_live
def test_c11_own_code_that_reads_a_number_is_to_keep_it_on_the_device(device):
    f = pg.record(lambda x: x / x.sum().item())
    for n in range(3):
        f(ramp(device, 3, start=n))
    assert "torch.where" in reasons(f)


@may_run_live
def test_c11_a_graph_layer_that_looks_for_loops(device, tmp_path):
    without_loops = installed(tmp_path, "torch_geometric/utils/loop.py")["without_loops"]
    f = pg.record(lambda edges: without_loops(edges) + 0, fallback="live")
    for _ in range(3):
        assert f(torch.tensor([[0, 1, 2], [1, 1, 0]], device=device)).tolist() == [[0, 2], [1, 0]]
    assert "add_self_loops=False" in reasons(f)


@may_run_live
@pytest.mark.parametrize("read", ["item", "numpy", "equal", "nonzero"])  # (of a GPU's tensor, an array is a copy first)
def test_c11_a_package_that_reads_values_beside_a_model_names_the_model(device, tmp_path, read):
    """By the expression that gives it, in what stands first."""
    reads = {"item": "x * x.sum().item()", "numpy": "x * float(x.detach().cpu().numpy()[0])",
             "equal": "x * torch.equal(x, x * 2)", "nonzero": "x * x.nonzero().numel()"}  # fmt: skip
    file, names = tmp_path / "site-packages" / "reads.py", {"torch": torch}
    exec(compile(f"def looked(x):\n    return {reads[read]}", str(file), "exec"), names)
    trainer = types.SimpleNamespace(net=torch.nn.Linear(3, 3, device=device), head=torch.nn.Linear(1, 1, device=device))
    f = pg.record(lambda x: names["looked"](trainer.net(x) + trainer.head.bias), fallback="live")
    with pytest.warns(pg.RunsLive) as said:
        assert len([f(ramp(device, 3, start=n)) for n in range(4)]) == 4
    assert "code of a package: record the model alone, trainer.net = pg.record(trainer.net))" in str(said[0].message)


def test_c11_a_package_that_reads_values_within_the_model_is_gone_around(device, tmp_path):
    model = Normalised(installed(tmp_path, "averages.py")["normalised"])
    f = pg.record(lambda x: model(x), fallback="live")
    with pytest.warns(pg.RunsLive, match=r'code of a package: use torch.compile\(..., backend="phonograph"\)'):
        assert len([f(ramp(device, 3, start=n)) for n in range(4)]) == 4


AUGMENTS = """
class Flip:
    def __init__(self):
        self.params = {}

    def __call__(self, x):
        self.params = {"flips": [torch.ones(2, device=x.device), object()]}
        return x.flip(0)
"""


@may_run_live
@pytest.mark.parametrize("whose", ["a package's", "the user's"])
def test_c11_what_code_of_a_package_changes_is_to_be_called_outside(device, tmp_path, whose):
    """Which works; nobody can write into a tensor in place of a package."""
    file, names = tmp_path / ("site-packages" if whose == "a package's" else "mine") / "flips.py", {"torch": torch}
    file.parent.mkdir()
    file.write_text(AUGMENTS)
    exec(compile(AUGMENTS, str(file), "exec"), names)
    flip = names["Flip"]()
    inside, outside = pg.record(lambda x: flip(x) * 2), pg.record(lambda x: x * 2)
    for n in range(4):
        x = ramp(device, 3, start=n)
        assert_same(inside(x), outside(flip(x)))
    assert "changes flip.params, which outlives the call" in reasons(inside)
    assert ("call that outside of the recorded function" in reasons(inside)) == (whose == "a package's"), reasons(inside)
    assert pg.stats(outside).replayed == 3
