"""C3, C5, C9: what a call puts into dictionaries and appends to lists that outlive it (`features["early"] = h`,
`shadow[name] = …`, `history.append(loss)`), and buffers and tuples that it rebinds. Each is played from recordings, with
eager's results, containers and order to the bit, whatever others do to the containers meanwhile; or it runs live, because it
looks at what it fills."""

import gc
import weakref
from collections import OrderedDict, defaultdict, deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from tests.helpers import KeepsItself, by_a_hook, may_run_live


def made(device):
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)).to(device)


def given(device, n, rows=5):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(n)).to(device)


def without_gradients(f, x):
    with torch.no_grad():
        return f(x)


def step_of(net, loss_of, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x):
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def hooked(net, features, detached):
    def keeps(name):
        def hook(module, args, out):
            features[name] = out.detach() if detached else out

        return hook

    net[0].register_forward_hook(keeps("early"))
    net[1].register_forward_hook(keeps("late"))


# Each takes what records a function, or leaves it as it is, and yields what there is after each call.
PLAYED, LIVE = {}, {}


def played(program):
    PLAYED[program.__name__] = program
    return program


def live(program):
    LIVE[program.__name__] = program
    return program


@played
def features_of_hooks(record, device):
    net, features = made(device), {}
    hooked(net, features, detached=True)
    f = record(net)
    for n in range(16):
        yield without_gradients(f, given(device, n)), dict(features)


@played
def features_that_are_trained(record, device):
    net, features = made(device), {}
    hooked(net, features, detached=False)
    step = record(step_of(net, lambda x: F.mse_loss(net(x), x) + features["early"].square().mean()))
    for n in range(16):
        yield step(given(device, n)), {k: v.detach() for k, v in features.items()}


@played
def features_of_a_module_that_is_trained(record, device):
    net, features = made(device), {}
    hooked(net, features, detached=False)
    f = record(net)
    step = step_of(net, lambda x: F.mse_loss(f(x), x) + features["early"].square().mean())
    for n in range(16):
        yield step(given(device, n)), {k: v.detach() for k, v in features.items()}


@played
def features_that_are_cleared_between(record, device):
    net, features = made(device), {}
    hooked(net, features, detached=True)
    f = record(net)
    for n in range(16):
        features.clear()
        yield without_gradients(f, given(device, n)), dict(features)


class Extractor(nn.Module):
    """Gives the very dictionary that its hooks fill."""

    def __init__(self, device):
        super().__init__()
        self.net, self._features = made(device), {"0": torch.empty(0), "1": torch.empty(0)}
        for name in self._features:
            self.net.get_submodule(name).register_forward_hook(self.keeps(name))

    def keeps(self, name):
        def hook(module, args, out):
            self._features[name] = out

        return hook

    def forward(self, x):
        self.net(x)
        return self._features


@played
def an_extractor(record, device):
    extractor = Extractor(device)
    f = record(extractor)
    for n in range(16):
        found = without_gradients(f, given(device, n))
        assert found is extractor._features
        yield dict(found)


@played
def a_history(record, device):
    net, history = made(device), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x):
        loss = F.mse_loss(net(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.detach())

    f = record(step)
    for n in range(16):
        f(given(device, n))
        yield list(history)


class Trainer:
    def __init__(self, device):
        self.net = made(device)
        self.losses, self.logs, self.last = [], defaultdict(list), deque(maxlen=3)

    def step(self, x):
        y = self.net(x).detach()
        self.losses.append(y.mean())
        for name in ("a", "b"):
            self.logs[name].append((y.sum(), {"name": name, "rows": len(x)}))
        self.last.append(y)
        self.last.append(x)
        return y


@played
def a_trainers_logs(record, device):
    trainer = Trainer(device)
    f = record(trainer.step)
    for n in range(20):
        if n == 9:
            trainer.losses.clear()
            trainer.last.append(3)
        if n == 11:
            trainer.losses.insert(0, 1.0)
            del trainer.logs["b"][1:3]
        y = f(given(device, n))
        assert trainer.last[-2] is y
        yield y, list(trainer.losses), {k: list(v) for k, v in trainer.logs.items()}, list(trainer.last)


@played
def a_list_that_is_replaced(record, device):
    trainer, kept = Trainer(device), []
    f = record(trainer.step)
    for n in range(20):
        if n in (6, 13):
            kept.append(trainer.losses)
            trainer.losses = [] if n == 6 else list(trainer.losses)
        yield f(given(device, n)), list(trainer.losses), [list(x) for x in kept]


@played
def activations(record, device):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.activations = made(device), []

        def forward(self, x):
            for layer in self.body:
                x = layer(x)
                self.activations.append(x.detach())
            return x

    net = Net()
    f = record(net)
    for n in range(16):
        net.activations.clear()
        yield without_gradients(f, given(device, n)), list(net.activations)


@played
def an_average_in_a_dictionary(record, device):
    net = made(device)
    shadow = {name: p.detach().clone() for name, p in net.named_parameters()}
    plain = step_of(net, lambda x: F.mse_loss(net(x), x))

    def step(x):
        loss = plain(x)
        with torch.no_grad():
            for name, p in net.named_parameters():
                shadow[name] = 0.9 * shadow[name] + 0.1 * p
        return loss

    f = record(step)
    for n in range(16):
        if n == 8:
            shadow["0.weight"] = torch.ones_like(shadow["0.weight"])
        if n == 11:
            shadow["2.bias"].zero_()
        yield f(given(device, n)), {k: v.clone() for k, v in shadow.items()}


class Rebinding(torch.optim.Optimizer):
    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if len(state) == 0:
                        state["m"] = torch.zeros_like(p)
                    state["m"] = state["m"] * 0.9 + p.grad * 0.1
                    p.add_(state["m"], alpha=-group["lr"])


@played
def an_optimizer_that_rebinds_its_state(record, device):
    net = made(device)
    optimizer = Rebinding(net.parameters())
    f = record(step_of(net, lambda x: F.mse_loss(net(x), x), optimizer))
    for n in range(20):
        if n == 8:
            optimizer.state[net[0].weight]["m"] = torch.ones_like(net[0].weight)
        if n == 11:
            for state in optimizer.state.values():
                state["m"].mul_(0.5)
        yield f(given(device, n)), [optimizer.state[p]["m"].clone() for p in net.parameters()], net[0].weight.detach().clone()


class Sharpness(torch.optim.Optimizer):
    """SAM: what the weights were is kept for the second step."""

    def __init__(self, parameters):
        super().__init__(parameters, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first(self):
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))

    @torch.no_grad()
    def second(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base.step()

    def step(self, closure=None):
        raise NotImplementedError


@played
def sharpness_aware(record, device):
    net = made(device)
    optimizer = Sharpness(net.parameters())

    def step(x):
        loss = F.mse_loss(net(x), x)
        loss.backward()
        optimizer.first()
        optimizer.zero_grad()
        F.mse_loss(net(x), x).backward()
        optimizer.second()
        optimizer.zero_grad()
        return loss.detach()

    f = record(step)
    for n in range(16):
        yield f(given(device, n)), [optimizer.state[p]["old"] for p in net.parameters()], net[0].weight.detach().clone()


@played
def states_by_parameter(record, device):
    net = made(device)
    states = {p: {} for p in net.parameters()}

    def step(x):
        F.mse_loss(net(x), x).backward()
        with torch.no_grad():
            for p in net.parameters():
                state = states[p]
                state["m"] = state["m"] * 0.9 + p.grad if "m" in state else p.grad.clone()
                p.sub_(state["m"], alpha=0.1)
                p.grad = None

    f = record(step)
    for n in range(20):
        if n == 9:
            for state in states.values():
                state.clear()
        f(given(device, n))
        yield [p.detach().clone() for p in net.parameters()], [state["m"] for state in states.values()]


@played
def registered_buffers(record, device):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.count = self.count + 1
            self.mean = self.mean * 0.9 + x.detach().mean(0)
            return x - self.mean / self.count

    net = nn.Sequential(Norm(), nn.Linear(6, 6), Norm()).to(device)
    with torch.no_grad():
        net[1].weight.copy_(torch.eye(6))
        net[1].bias.zero_()
    f = record(net)
    for n in range(20):
        if n == 8:
            net[0].mean = torch.ones(6, device=device)
        if n == 11:
            net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()})
        if n == 14:
            net[2].mean.zero_()
        x = given(device, n)
        yield f(x).detach(), {k: v.clone() for k, v in net.state_dict().items()}


class Hidden(nn.Module):
    """Keeps its hidden state as a tuple, and a memory as a list, of which it makes another each time."""

    def __init__(self, device):
        super().__init__()
        torch.manual_seed(4)
        self.cell, self.head = nn.LSTMCell(6, 12).to(device), nn.Linear(12, 6).to(device)
        self.hidden, self.memory = None, [torch.zeros(5, 6, device=device)]

    def forward(self, x):
        h, c = self.cell(x, self.hidden)
        self.hidden = (h.detach(), c.detach())
        self.memory = [*(m * 0.5 for m in self.memory[-1:]), x.detach()]
        return self.head(h) + self.memory[0]


@played
def hidden_states_in_tuples_and_lists(record, device):
    net = Hidden(device)
    f = record(net)
    step, kept = step_of(net, lambda x: F.mse_loss(f(x), x)), []
    for n in range(24):
        if n == 9:
            net.hidden = None
        if n == 12:
            net.hidden = (net.hidden[1], net.hidden[0])
        if n == 14:
            net.hidden = (net.hidden[0], net.hidden[0])
        if n == 17:
            net.memory.append(torch.ones(5, 6, device=device))
        loss = step(given(device, n))
        kept = [*kept[-2:], (net.hidden, net.memory)]
        yield loss, kept


@played
def what_was_there_is_given_moved_and_swapped(record, device):
    class Kept:
        def __init__(self):
            self.last, self.items = None, {k: torch.full((5, 6), float(i), device=device) for i, k in enumerate("abc")}

        def step(self, x):
            items = self.items
            self.last, first = items["a"], items["c"]
            items["a"], items["b"] = items["b"], items["a"] + x
            items["c"] = x * 2
            return first, x

    kept = Kept()
    f = record(kept.step)
    for n in range(16):
        yield f(given(device, n)), kept.last, dict(kept.items)


@played
def keys_that_come_and_go(record, device):
    cache = {}

    def f(x):
        y = x * (1 + len(cache)) + sum(1 for key in cache if key.startswith("z"))
        if "k" in cache and cache["k"].shape == x.shape:
            y = y + cache["k"]
        cache["j"], cache["k"] = x * 2, y
        return y

    f = record(f)
    for n in range(60):
        if n == 12:
            cache["z"] = 1
        if n == 20:
            del cache["z"]
        if n == 28:
            cache.clear()
        if n == 36:
            cache["j"] = cache.pop("j")  # of another order
        if n == 44:
            cache["k"] = torch.zeros(1, device=device)
        yield f(given(device, n)), list(cache.items())


@played
def an_ordered_dictionary(record, device):
    items = OrderedDict()

    def f(x):
        items["a"] = x * 2
        items["b"] = x * 3
        return x + 1

    f = record(f)
    for n in range(16):
        if n == 8:
            items.move_to_end("a")
        yield f(given(device, n)), list(items.items())


@played
def a_dictionary_that_is_replaced(record, device):
    class Kept:
        def __init__(self):
            self.items = {"inner": {}}

        def step(self, x):
            self.items["inner"]["k"] = x * 2
            self.items["sum"] = x.sum()
            return x + 1

    kept, before = Kept(), []
    f = record(kept.step)
    for n in range(24):
        if n in (6, 14):
            before.append(kept.items)
            kept.items = {"inner": {}} if n == 6 else {**kept.items, "inner": dict(kept.items["inner"])}
        found = [{k: v if k != "inner" else dict(v) for k, v in items.items()} for items in [kept.items, *before]]
        yield f(given(device, n)), found


@played
def others_read_it(record, device):
    items, values = {}, []

    def fills(x):
        items["k"] = x * 2
        values.append(x.sum())
        return x + 1

    f, reads = record(fills), lambda x: x + items["k"].sum() * len(values)
    for n in range(16):
        x = given(device, n)
        yield f(x), reads(x)


@played
def what_is_given_is_what_stands_there(record, device):
    items = {"k": torch.zeros(5, 6, device=device)}

    def f(x, y):
        items["k"] = items["k"] + x
        return y * 2 + items["k"]

    f = record(f)
    for n in range(16):
        yield f(given(device, n), items["k"] if n in (6, 7, 11) else given(device, n + 50)), items["k"]


@played
def written_and_rebound(record, device):
    items, held = {"k": torch.zeros(5, 6, device=device)}, []

    def f(x):
        items["k"] += x
        items["k"] = items["k"] * 2
        return items["k"].sum()

    f = record(f)
    for n in range(16):
        held = [*held[-2:], items["k"]]
        yield f(given(device, n)), items["k"].clone(), [t.clone() for t in held]


@live
def a_list_whose_length_is_asked(record, device):
    values = []

    def f(x):
        values.append(x.sum())
        return x * len(values)

    f = record(f)
    for n in range(8):
        yield f(given(device, n)), list(values)


@live
def a_list_whose_last_value_is_used(record, device):
    class Kept:
        def __init__(self):
            self.values = []

        def step(self, x):
            self.values.append(x + self.values[-1] if self.values else x)
            return x * 2

    kept = Kept()
    f = record(kept.step)
    for n in range(8):
        yield f(given(device, n)), list(kept.values)


@live
def a_list_that_has_two_names(record, device):
    values = []
    other = {"values": values}

    def f(x):
        values.append(x.sum())
        return x * len(other["values"])

    f = record(f)
    for n in range(8):
        yield f(given(device, n)), list(values)


@live
def a_list_that_is_read_by_another_variable(record, device):
    class Kept:
        def __init__(self):
            self.values = []

        def step(self, x):
            values = self.values
            values.append(x.sum())
            return torch.stack(values).sum()

    kept = Kept()
    f = record(kept.step)
    for n in range(8):
        yield f(given(device, n)), list(kept.values)


@live
def a_list_that_is_read_by_a_made_up_name(record, device):
    class Kept:
        def __init__(self):
            self.values = []

        def step(self, x):
            self.values.append(x.sum())
            return x * sum(len(v) for v in vars(self).values())

    kept = Kept()
    f = record(kept.step)
    for n in range(8):
        yield f(given(device, n)), list(kept.values)


@played
def a_list_that_is_both_kept_and_given(record, device):
    class Kept:
        def __init__(self):
            self.values = []

        def step(self, x):
            self.values = [x * 2]
            return self.values

    kept = Kept()
    f = record(kept.step)
    for n in range(8):
        found = f(given(device, n))
        assert found is kept.values
        yield list(found)


@live
def which_tensor_it_is(record, device):
    items = {"k": torch.zeros(5, 6, device=device)}
    other = [items["k"]]

    def f(x):
        y = x * 2 if items["k"] is other[0] else x * 3
        items["k"] = y
        return y

    f = record(f)
    for n in range(8):
        if n == 5:
            other[0] = items["k"]
        yield f(given(device, n)), items["k"]


@live
def a_part_that_runs_live_looks(record, device):
    values, items, seen = [], {}, []

    @pg.live
    def look():
        seen.append((len(values), len(items)))

    def f(x):
        values.append(x.sum())
        items["k"] = x.mean()
        look()
        return x * 2

    f = record(f)
    for n in range(8):
        yield f(given(device, n)), list(values), dict(items), list(seen)


@live
def keys_that_never_come_again(record, device):
    items = {}

    def f(x):
        items[object()] = x * 2
        return x + 1

    f = record(f)
    for n in range(24):
        yield f(given(device, n)), list(items.values())


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.requires_grad == b.requires_grad and a.stride() == b.stride()
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def compared(program, device):
    """Run beside eager. What there was after earlier calls stays what it is."""
    records = []

    def record(f):
        records.append(pg.record(f))
        return records[-1]

    held = []
    for n, pair in enumerate(zip(program(record, device), program(lambda f: f, device), strict=True)):
        held = [*held[-2:], pair]
        for ours, theirs in held:
            assert same(ours, theirs), n
    return records[0]


@pytest.mark.parametrize("program", PLAYED.values(), ids=PLAYED)
def test_c09_what_is_put_into_containers_is_left_by_each_replay(device, program):
    recorded = compared(program, device)
    stats = pg.stats(recorded)
    assert stats.replayed >= 0.7 * stats.calls, pg.explain(recorded)


@may_run_live
@pytest.mark.parametrize("program", LIVE.values(), ids=LIVE)
def test_c09_what_looks_at_what_it_fills_runs_live(device, program):
    recorded = compared(program, device)
    assert not pg.stats(recorded).replayed, pg.explain(recorded)


def test_c13_an_exception_in_the_middle_leaves_what_eager_leaves(device):
    def program(record, device):
        values, items = [], {}

        def f(x):
            values.append(x.sum())
            items["k"] = x.mean()
            if len(x) == 3:
                raise ValueError("three")
            return x * 2

        f = record(f)
        for n in range(16):
            try:
                found = f(given(device, n, 3 if n in (4, 5, 9) else 5))
            except ValueError as e:
                found = str(e)
            yield found, list(values), dict(items)

    recorded = compared(program, device)
    assert pg.stats(recorded).replayed >= 10, pg.explain(recorded)


@may_run_live
@pytest.mark.parametrize("kept_by", [KeepsItself.apply, by_a_hook, torch.mul], ids=["ctx", "hook", "operator"])
def test_c06_a_backward_that_reads_what_was_there(device, kept_by):
    def program(record, device):
        weight, items = nn.Parameter(torch.ones(6, device=device)), {"last": torch.ones(5, 6, device=device)}

        def f(x):
            y = kept_by(weight * x, items["last"])
            items["last"] = x * 3
            return y

        f = record(f)
        for n in range(10):
            weight.grad = None
            f(given(device, n)).sum().backward()
            yield weight.grad.clone(), items["last"]

    compared(program, device)


@may_run_live
@pytest.mark.parametrize("first", [0, 6])
def test_c07_a_container_that_is_filled_and_given_as_well(device, first):
    def program(record, device):
        items, values = {"k": torch.zeros(5, 6, device=device)}, []

        def f(x, batch):
            items["k"] = x * 2
            values.append(x.sum())
            return batch["k"] * 3, [*batch]

        f = record(f)
        for n in range(20):
            x = given(device, n)
            batch = items if first <= n < first + 3 or n > 14 else {"k": x + 1}
            yield f(x, batch), dict(items), list(values)

    recorded = compared(program, device)
    assert pg.stats(recorded).replayed >= 8, pg.explain(recorded)


def test_c05_a_steady_loop_that_keeps_all_is_recorded_once(device):
    values = []
    step = pg.record(lambda x: values.append(x.sum()))
    for n in range(40):
        step(given(device, n))
    assert pg.stats(step).recorded == 1
    assert len(values) == 40


def test_c09_features_that_nobody_reads_are_not_copied(device):
    net, features = made(device), {}
    hooked(net, features, detached=True)
    f = pg.record(net)
    with torch.no_grad():
        for n in range(12):
            f(given(device, n))
    assert pg.stats(f).replayed >= 10, pg.explain(f)
    assert pg.stats(f).bytes_copied == pg.stats(f).replayed * given(device, 0).nbytes


def test_c18_what_is_put_and_appended_is_not_kept_longer(device):
    values, items = [], {}

    def f(x):
        values.append(x * 2)
        items["k"] = x * 3
        return x + 1

    f = pg.record(f)
    found = []
    for n in range(12):
        f(given(device, n))
        found += [weakref.ref(values[-1].untyped_storage()), weakref.ref(items["k"].untyped_storage())]
    values.clear()
    items.clear()
    gc.collect()
    assert not any(ref() is not None for ref in found)


@may_run_live
def test_c10_verify_does_not_append_twice(device):
    values = []
    f = pg.record(lambda x: values.append(x.sum()), verify=1)
    for n in range(6):
        f(given(device, n))
    assert len(values) == 6


WRITTEN_IN_PLACE = {
    "a number": ("a", 0.0, lambda d, x: d.__setitem__("a", d.get("a", 0.0) + 0.5)),
    "a count that is read": ("a", 0, lambda d, x: d.__setitem__("a", d["a"] + 1)),
    "a flag": ("a", False, lambda d, x: d.__setitem__("a", not d["a"])),
    "a number of a list": (0, 0.0, lambda d, x: d.__setitem__(0, d[0] + 0.5)),
}


@may_run_live
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(("key", "first", "does"), WRITTEN_IN_PLACE.values(), ids=WRITTEN_IN_PLACE)
def test_c09_an_equal_container_takes_the_place_of_one_that_is_written(device, key, first, does, every):
    """The one that has left is written no more."""

    class Fields:
        pass

    def run(record):
        fields = Fields()
        fields.tally = [first] if key == 0 else {key: first}

        def step(x):
            does(fields.tally, x)
            return x * fields.tally[key]

        step, found = record(step), []
        for n in range(16):
            found.append([step(given(device, n)), fields.tally[key]])
            if n % every == every - 1:
                fields.tally = type(fields.tally)(fields.tally)
        return found

    assert same(run(lambda f: pg.record(f, keep="always")), run(lambda f: f))
