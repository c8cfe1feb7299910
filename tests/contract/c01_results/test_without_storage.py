"""Tensors that are no memory with a shape: what `vmap` and `grad` leave behind, shapes on the meta device, fake, sparse, nested
and quantized tensors, parameters that are not initialized yet, wrappers (DTensor, quantized weights). In reach they do not
matter; where an operator works with one, it is recorded, or the call runs live and says with what."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, functionalize, grad, hessian, jacrev, jvp, stack_module_state, vmap

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import assert_settles, counts, may_run_live, ramp, reasons, side_by_side


class Net(nn.Module):
    def __init__(self, inputs=6):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(inputs, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def fixed(device, *shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


# ---------------------------------------------------------------------------------------------------
# In reach, and no operator works with it

KINDS = {}


def kind(make):
    KINDS[make.__name__] = make
    return make


def left_by(transform, device):
    """The tensor that a transform has shown to a function, which has kept it."""
    kept = []

    def function(x):
        kept.append(x * 2)
        return (x * 2).sum()

    transform(function)(fixed(device, 4, 3))
    return kept[-1]


for name, transform in {
    "vmap": vmap,
    "grad": grad,
    "vmap_of_grad": lambda f: vmap(grad(f)),
    "hessian": hessian,
    "jvp": lambda f: lambda x: jvp(f, (x,), (x,)),
    "functionalize": functionalize,
}.items():
    KINDS[f"left_by_{name}"] = lambda device, transform=transform: left_by(transform, device)


@kind
def parameter_in_vmap(device):
    kept = []
    vmap(lambda x: kept.append(nn.Parameter(x.detach())) or x)(fixed(device, 4, 3))
    return kept[0]


@kind
def module_on_meta(device):
    module = Net().to("meta")
    module(torch.empty(2, 6, device="meta")).sum().backward()
    return module


@kind
def fake(device):
    with FakeTensorMode():
        return [torch.empty(4, 3, device=device), nn.Linear(3, 4, device=device)]


@kind
def not_initialized(device):
    return nn.ModuleList([nn.LazyLinear(3, device=device), nn.LazyBatchNorm1d(device=device)])


@kind
def sparse(device):
    with torch.inference_mode():
        of_inference = fixed(device, 3, 3).to_sparse()
    return [fixed(device, 3, 3).to_sparse(), fixed(device, 3, 3).to_sparse_csr(), of_inference]


@kind
def nested(device):
    rows = [fixed(device, 2, 3), fixed(device, 4, 3)]
    return [torch.nested.nested_tensor(rows), torch.nested.nested_tensor(rows, layout=torch.jagged)]


@kind
def quantized(device):
    return torch.quantize_per_tensor(fixed("cpu", 3), 0.1, 0, torch.qint8)


@kind
def opaque(device):
    return fixed("cpu", 3).to_mkldnn() if torch.backends.mkldnn.is_available() else None


@kind
def masked(device):
    return torch.masked.masked_tensor(fixed(device, 3), torch.tensor([True, False, True], device=device))


@kind
def known_to_be_zero(device):
    return torch._efficientzerotensor(3, device=device)


@kind
def given_back(device):
    flat = fixed(device, 100)
    flat.untyped_storage().resize_(0)
    return flat


@kind
def wrapper(device):
    return Scaled(fixed(device, 4, 3))


@pytest.mark.filterwarnings("ignore")  # torch's, about prototypes
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_c08_tensors_without_memory_in_reach_do_not_matter(device, make):
    def program():
        net, kept = Net().to(device), {"extra": make(device), "factor": 2.0}
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

        def step(x):
            loss = (net(x) * kept["factor"]).square().mean() + (kept["extra"] is None)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    assert_settles(side_by_side(program), ramp(device, 4, 6))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [*KINDS.values()][::3], ids=[*KINDS][::3])
def test_c10_verify_with_tensors_without_memory_in_reach(device, make):
    net, kept = Net().to(device), make(device)
    f = pg.record(lambda x: net(x).detach() if kept is not None else x, warmup=1, verify=2)
    x = ramp(device, 4, 6)
    for _ in range(6):
        assert_same(f(x), net(x).detach())
    assert pg.stats(f).replayed == 5


def test_c08_another_tensor_without_memory_is_noticed(device):
    """Its shape decides."""
    kept = [left_by(vmap, device)]
    f = pg.record(lambda x: x * kept[0].dim(), warmup=1)
    x = ramp(device, 3)
    for _ in range(4):
        assert_same(f(x), x)
    kept[0] = left_by(grad, device)
    for _ in range(4):
        assert_same(f(x), x * 2)
    assert pg.stats(f).replayed > 3


def test_c08_a_lazy_layer_is_initialized_later(device):
    def program():
        torch.manual_seed(0)
        lazy, net = nn.LazyLinear(3, device=device), Net().to(device)
        return lambda x, both: lazy(x) * net(x) if both else net(x)

    both = side_by_side(program)
    for use in (False,) * 5 + (True,) * 5 + (False,) * 2:
        torch.manual_seed(1)
        both(ramp(device, 4, 6), use)
    assert counts(both)[2] > 5


def test_c08_a_module_on_meta_gets_memory(device):
    def program():
        net, other, ready = Net().to(device), Net().to("meta"), []

        def step(x, materialize):
            if materialize and not ready:
                other.to_empty(device=device)
                other.load_state_dict(net.state_dict())
                ready.append(True)
            return net(x) + (other(x) if ready else sum(p.numel() for p in other.parameters()))

        return step

    recorded, live = pg.record(program(), warmup=1), program()
    x = ramp(device, 4, 6)
    for materialize in (False, False, False, True, False, False, False):
        with torch.no_grad():
            assert_same(recorded(x, materialize), live(x, materialize))


# ---------------------------------------------------------------------------------------------------
# torch.func


@pytest.mark.parametrize("fused", [False, True])
def test_c01_an_ensemble_of_critics(device, fused):
    """As in SAC: `stack_module_state`, a base model on meta, `vmap` of `functional_call`, targets that follow."""

    def program():
        critics = [Net(8).to(device) for _ in range(2)]
        for critic in critics:
            nn.init.normal_(critic.last.weight, generator=torch.Generator(device).manual_seed(2))
        base = copy.deepcopy(critics[0]).to("meta")
        params = {k: p.detach().clone().requires_grad_() for k, p in stack_module_state(critics)[0].items()}
        targets = {k: p.detach().clone() for k, p in params.items()}
        own = {"fused": True} if fused else {"capturable": device.type == "cuda"}
        optimizer = torch.optim.Adam([*params.values()], lr=1e-2, **own)

        def values(params, seen):
            return vmap(lambda p, s: functional_call(base, p, (s,)), (0, None))(params, seen)

        def update(seen, reward):
            with torch.no_grad():
                wanted = reward + 0.9 * values(targets, seen).min(0).values
            loss = (values(params, seen) - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for k, target in targets.items():
                    target.lerp_(params[k], 0.1)
            return loss.detach()

        return update

    assert_settles(side_by_side(program, tolerance=1e-4), fixed(device, 4, 8), fixed(device, 4, 1))


def test_c01_gradients_of_each_sample(device):
    def program():
        net = Net().to(device)
        params = {k: p.detach() for k, p in net.named_parameters()}

        def loss(params, x, y):
            return (functional_call(net, params, (x[None],)) - y).square().mean()

        def step(x, y):
            grads = vmap(grad(loss), (None, 0, 0))(params, x, y)
            for k, p in params.items():
                p.sub_(0.01 * grads[k].clamp(-1, 1).mean(0))
            return torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()])

        return step

    assert_settles(side_by_side(program, tolerance=1e-6), fixed(device, 5, 6), fixed(device, 5, 1))


def test_c01_a_step_within_a_step(device):
    """MAML: `functional_call` with weights after a step, over a batch of tasks, differentiated as a whole."""

    def program():
        net = Net().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def error(params, x, y):
            return (functional_call(net, params, (x,)) - y).square().mean()

        def task(x, y):
            params = dict(net.named_parameters())
            grads = grad(error)(params, x, y)
            return error({k: p - 0.1 * grads[k] for k, p in params.items()}, x, y)

        def step(x, y):
            loss = vmap(task)(x, y).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    assert_settles(side_by_side(program, tolerance=1e-6), fixed(device, 3, 4, 6), fixed(device, 3, 4, 1))


def test_c01_second_derivatives_in_the_loss(device):
    """Of a network that solves a differential equation. Forward mode makes tensors that are zero and have no memory."""

    def program():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def u(x):
            return net(x[None]).squeeze()

        def step(x):
            loss = (vmap(hessian(u))(x).squeeze() + vmap(u)(x) + vmap(jacrev(u))(x).squeeze()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    assert_settles(side_by_side(program, tolerance=1e-6), fixed(device, 5, 1))


def test_c01_what_grad_left_behind_is_used(device):
    """torch takes the tensor that it stands for. A write to that is seen, and another one is noticed."""

    def program():
        net, kept = Net().to(device), [left_by(grad, device).sum(0), left_by(grad, device)]
        kept[0] = left_by(grad, device)
        return lambda x: net(x).detach() * kept[0].sum()

    assert_settles(side_by_side(program), ramp(device, 4, 6))


@may_run_live
def test_c11_a_batched_tensor_that_outlives_the_call(device):
    def program():
        net = Net().to(device)
        net.seen = None

        def one(x):
            net.seen = net.first(x)
            return net.last(net.seen)

        return lambda x: vmap(one)(x).detach()

    recorded, live = pg.record(program(), warmup=1), program()
    for _ in range(4):
        assert_same(recorded(ramp(device, 4, 6)), live(ramp(device, 4, 6)))
    assert "net.seen, which outlives the call" in reasons(recorded)


@pytest.mark.parametrize("transform", [lambda f: jacrev(f), lambda f: vmap(lambda x: f(x[None])[0])], ids=["jacrev", "vmap"])
@may_run_live
def test_c01_a_recorded_function_in_a_transform(device, transform):
    net = Net().to(device)
    f = pg.record(lambda x: net(x), warmup=1)
    for _ in range(3):
        f(ramp(device, 4, 6))
        torch.testing.assert_close(transform(f)(ramp(device, 4, 6)), transform(net)(ramp(device, 4, 6)))


# ---------------------------------------------------------------------------------------------------
# An operator works with it


def test_c01_a_module_on_meta_is_asked_for_a_shape(device):
    def program():
        net, shadow = Net().to(device), Net().to("meta")
        return lambda x: net(x).detach() * shadow(x.to("meta")).shape[0]

    assert_settles(side_by_side(program), ramp(device, 4, 6))


def test_c01_a_fake_tensor_is_computed_with(device):
    def program():
        net = Net().to(device)
        with FakeTensorMode():
            example = torch.empty(4, 6, device=device)
        return lambda x: net(x).detach() * (example + 1).sum(0).shape[0]

    assert_settles(side_by_side(program), ramp(device, 4, 6))


def _nested(x):
    return torch.nested.as_nested_tensor([x[:1], x[1:]]).to_padded_tensor(0.0)


REFUSED = {
    "sparse weights": (lambda x, kept: torch.sparse.mm(kept, x), lambda: torch.eye(4).to_sparse(),
                       "works with a sparse_coo tensor"),
    "csr weights": (lambda x, kept: kept @ x, lambda: torch.eye(4).to_sparse_csr(), "works with a sparse_csr tensor"),
    "made sparse": (lambda x, kept: torch.sparse_coo_tensor(kept, x[0], (6,)).to_dense(), lambda: torch.arange(6)[None],
                    "gives a sparse_coo tensor"),
    "made nested": (lambda x, kept: _nested(x), lambda: None, "gives a nested tensor"),
}  # fmt: skip


@may_run_live
@pytest.mark.filterwarnings("ignore:.*(prototype|beta|Sparse).*")
@pytest.mark.parametrize(("function", "make", "reason"), REFUSED.values(), ids=REFUSED)
def test_c11_the_reason_names_what_kind_of_tensor_it_is(device, function, make, reason):
    kept = make()
    kept = None if kept is None else kept.to(device)
    f = pg.record(lambda x: function(x, kept), warmup=1)
    for n in range(4):
        x = ramp(device, 4, 6, start=n)
        assert_same(f(x), function(x, kept))
    assert reason in reasons(f)
    assert __file__ in reasons(f)


@may_run_live
def test_c11_quantized_weights(device):
    """A replay on the CPU lost by what a tensor is quantized, and raised."""
    weights = torch.quantize_per_tensor(fixed("cpu", 4, 6), 0.1, 0, torch.qint8)
    f = pg.record(lambda x: x + weights.dequantize().to(x.device), warmup=1)
    for n in range(4):
        x = ramp(device, 4, 6, start=n)
        assert_same(f(x), x + weights.dequantize().to(device))
    assert "works with a quantized tensor" in reasons(f)
    if device.type == "cpu":
        g = pg.record(lambda t: t.dequantize() * 2, warmup=1)
        for scale in (0.1, 0.1, 0.1, 0.5):
            t = torch.quantize_per_tensor(fixed("cpu", 4), scale, 0, torch.qint8)
            assert_same(g(t), t.dequantize() * 2)
        assert "takes a quantized tensor" in reasons(g)


ARGUMENTS = {
    "meta": lambda device: torch.empty(4, 6, device="meta"),
    "sparse_coo": lambda device: fixed(device, 4, 6).to_sparse(),
    "nested": lambda device: torch.nested.nested_tensor([fixed(device, 2), fixed(device, 3)]),
}


@may_run_live
@pytest.mark.filterwarnings("ignore:.*(prototype|beta|Sparse).*")
@pytest.mark.parametrize("what", ARGUMENTS)
def test_c11_arguments_and_results_without_memory(device, what):
    f = pg.record(lambda x, other: (x + 1, other.dim()), warmup=1)
    g = pg.record(lambda x: (x + 1, kept), warmup=1)
    kept = ARGUMENTS[what](device)
    for n in range(4):
        x = ramp(device, 4, start=n)
        assert_same(f(x, ARGUMENTS[what](device))[0], x + 1)
        assert f(x, ARGUMENTS[what](device))[1] == 2
        assert_same(g(x)[0], x + 1)
        assert g(x)[1] is kept
    assert f"takes a {what} tensor" in reasons(f)
    assert f"returns a {what} tensor" in reasons(g)


# ---------------------------------------------------------------------------------------------------
# Wrappers: they say what an operator means, by others


class Scaled(torch.Tensor):
    """Numbers and what they are multiplied by, as quantized weights are: operators get the products."""

    __slots__ = ["factor", "numbers"]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers, factor=1.0):
        made = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype, device=numbers.device)
        made.numbers, made.factor = numbers, factor
        return made

    def __tensor_flatten__(self):
        return ["numbers"], self.factor

    @classmethod
    def __tensor_unflatten__(cls, inner, factor, size, stride):
        return cls(inner["numbers"], factor)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default):
            return cls(func(args[0].numbers), args[0].factor)
        plain = [x.numbers * x.factor if isinstance(x, cls) else x for x in args]
        return func(*plain, **(kwargs or {}))


class Doubled(torch.Tensor):
    """It has memory, and its sums are doubled."""

    @staticmethod
    def __new__(cls, numbers):
        made = torch.Tensor._make_subclass(cls, numbers)
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        out = func(*[x.numbers if isinstance(x, cls) else x for x in args], **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.add.Tensor else out


def with_weight(device, made):
    net = Net().to(device)
    net.first.weight = nn.Parameter(made(net.first.weight.detach()), requires_grad=False)
    return net


def test_c01_a_class_of_tensors_says_what_operators_mean(device):
    """Its code was not followed: a replay gave what plain tensors give."""

    def program():
        kept = Doubled(fixed(device, 4, 6))
        return lambda x: (x + kept) * 3

    assert_settles(side_by_side(program), ramp(device, 4, 6))


def test_c01_weights_in_a_wrapper(device):
    def program():
        net = with_weight(device, lambda w: Scaled(w, 0.5))
        return lambda x: net(x).detach()

    assert_settles(side_by_side(program), ramp(device, 4, 6))


def test_c08_what_a_wrapper_is_made_of_changes(device):
    kept = Scaled(fixed(device, 4, 6), 2.0)
    f, x = pg.record(lambda x: x + kept, warmup=1), ramp(device, 4, 6)

    def write():
        kept.numbers.mul_(3)

    def replace():
        kept.numbers = torch.ones(4, 6, device=device)

    def scale():
        kept.factor = 5.0

    for change in (lambda: None, write, scale, replace, write):
        change()
        for _ in range(3):
            assert_same(f(x), x + kept.numbers * kept.factor)
    assert pg.stats(f).replayed > 8


def test_c06_a_model_with_frozen_weights_in_a_wrapper(device):
    """Its backward runs outside."""
    net = with_weight(device, lambda w: Scaled(w, 0.5))
    for p in net.parameters():
        p.requires_grad_(False)
    adapter = nn.Linear(6, 6, device=device)
    live = copy.deepcopy(adapter)
    recorded = pg.record(lambda x: net.first.bias.sum() + adapter(x) @ (net.first.weight.numbers * 0.5).t(), warmup=1)
    for n in range(5):
        x = ramp(device, 4, 6, start=n)
        recorded(x).sum().backward()
        (net.first.bias.sum() + live(x) @ (net.first.weight.numbers * 0.5).t()).sum().backward()
        assert_same(adapter.weight.grad, live.weight.grad)
        adapter.zero_grad()
        live.zero_grad()
    assert pg.stats(recorded).replayed == 4


@may_run_live
def test_c11_weights_in_a_wrapper_that_are_trained(device):
    net = Net().to(device)
    net.first.weight = nn.Parameter(Scaled(net.first.weight.detach()).requires_grad_())
    f = pg.record(lambda x: net(x).sum(), warmup=1)
    for _ in range(4):
        f(ramp(device, 4, 6))
    assert "works with a tensor of class Scaled that requires a gradient" in reasons(f)
    optimizer = torch.optim.SGD([net.first.weight], lr=0.1)

    @pg.record(warmup=1)
    @torch.no_grad()
    def forget(x):
        optimizer.zero_grad()
        return x + 1

    for _ in range(4):
        net.first.weight.grad = Scaled(torch.ones(8, 6, device=device))
        assert_same(forget(ramp(device, 4)), ramp(device, 4) + 1)
        assert net.first.weight.grad is None
    assert pg.stats(forget).replayed == 3


def test_c08_a_distributed_tensor_in_reach(device, mesh):
    from torch.distributed.tensor import Replicate, distribute_tensor

    def program():
        net = Net().to(device)
        net.reference = distribute_tensor(fixed(device, 4, 1), mesh, [Replicate()])
        return lambda x: net(x).detach() * net.reference.dim() + net.reference.to_local()

    assert_settles(side_by_side(program), ramp(device, 4, 6))


def test_c01_a_distributed_module(device, mesh):
    from torch.distributed.tensor import DTensor, Replicate, distribute_module

    net = distribute_module(Net().to(device), mesh)
    same = Net().to(device)

    def through(x):
        return net(DTensor.from_local(x, mesh, [Replicate()])).to_local()

    f, g = pg.record(through, warmup=1), pg.record(through, warmup=1)
    for n in range(4):
        x = ramp(device, 4, 6, start=n)
        with torch.no_grad():
            assert_same(f(x), same(x))
        assert_same(g(x).detach(), same(x).detach())
    assert pg.stats(f).replayed == pg.stats(g).replayed == 3


@may_run_live
def test_c11_a_collective_that_goes_on_in_the_background(device, mesh):
    from torch.distributed._functional_collectives import all_reduce

    if device.type != "cpu":
        pytest.skip("gloo works on the CPU")
    f = pg.record(lambda x: all_reduce(x * 2, "sum", mesh.get_group()) + 1, warmup=1)
    for n in range(4):
        x = ramp(device, 3, start=n)
        torch.testing.assert_close(f(x) + 0, x * 2 + 1)
    assert pg.stats(f).replayed == 3, reasons(f)


@may_run_live
def test_c11_fully_sharded_modules(device, mesh):
    from torch.distributed.fsdp import fully_shard

    net, same = Net().to(device), Net().to(device)
    fully_shard(net, mesh=mesh)
    optimizer, live = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(same.parameters(), lr=0.1)
    pg.record(net, warmup=1)
    for n in range(4):
        x = ramp(device, 4, 6, start=n)
        for model, steps in ((net, optimizer), (same, live)):
            model(x).square().mean().backward()
            steps.step()
            steps.zero_grad()
        assert_same(net.last.bias.detach().full_tensor(), same.last.bias.detach())
    assert "contains FSDPModule" in reasons(net)
