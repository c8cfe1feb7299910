"""Graphs of Dynamo's that are split: `live=`, `record=`, and what is known to be none to record."""

import copy
import gc
import itertools
import sys
import warnings
import weakref

import pytest
import torch
import torch._dynamo.config
from torch import nn

import phonograph as pg
from phonograph.compile import backend, graphs, measured, partition
from phonograph.engine import profitability as paying
from phonograph.testing import assert_same
from tests.helpers import may_run_live

pytestmark = pytest.mark.filterwarnings("error::phonograph.RunsLive", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def shown(monkeypatch):
    """The parts of each graph, in order: whether they run live, and the names of their nodes."""
    found, split = [], partition.parts

    def noting(*args):
        parts = split(*args)
        nodes = [] if parts is None else [(p.live, [n.name for n in p.graph.graph.nodes if n.op.startswith("call_")])
                                          for p in parts[1].values()]  # fmt: skip
        found.append(nodes)
        return parts

    monkeypatch.setattr(sys.modules["phonograph.compile.backend"], "parts", noting)
    return found


class Sides:
    """A module compiled with the backend, and a copy of it in eager mode."""

    def __init__(self, module, *, inner="aot_eager", **options):
        self.modules = module, copy.deepcopy(module)
        self.called = torch.compile(self.modules[0], backend=backend, options={"inner": inner, **options}), self.modules[1]

    def __call__(self, *args, seed=0):
        found = []
        for module, call in zip(self.modules, self.called, strict=True):
            torch.manual_seed(seed)
            module.zero_grad()
            result = call(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args])
            results = result if isinstance(result, tuple) else (result,)
            if any(t.requires_grad for t in results):
                sum(t.square().sum() for t in results if t.requires_grad).backward()
            grads = [p.grad for p in module.parameters()]
            found.append((result, grads, [b.clone() for b in module.buffers()], torch.rand(2, device=results[0].device)))
        assert_same(*found)


def run(module, device, *, calls=5, rows=(4,), **options):
    sides = Sides(module.to(device), **options)
    sizes = itertools.cycle(rows)
    for n in range(calls):
        torch.manual_seed(100 + n)
        sides(torch.randn(next(sizes), 8, device=device), seed=n)
    return sides


def replayed():
    return sorted(pg.stats(graph).replayed for graph in graphs())


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weigh = nn.Linear(8, 8)

    def forward(self, x):
        return torch.sort(self.weigh(x), dim=1)[0]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.router, self.after = nn.Linear(8, 8), Router(), nn.Linear(8, 8)

    def forward(self, x):
        return self.after(nn.functional.dropout(self.router(self.before(x)), 0.1) + x)


def sorts(node):
    return "sort" in str(node.target)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("rule", ["aten::sort", "aten::sort.stable", torch.ops.aten.sort, torch.ops.aten.sort.default,
                                  "*.router", "[01].router", sorts])  # fmt: skip
def test_c11_the_user_says_what_runs_live(device, rule, inner, shown):
    torch.manual_seed(0)
    run(nn.Sequential(Block(), Block()), device, live=[rule], inner=inner)
    assert [live for live, _ in shown[0]] == [False, True, False, True, False]
    assert replayed() == [4, 4, 4]
    assert any("sort" in name for name in shown[0][1][1])
    said = [pg.explain(graph) for graph in graphs()]
    assert all("beside it runs live" in s and __file__ in s for s in said)


def test_c11_one_module_runs_live(device, shown):
    torch.manual_seed(0)
    run(nn.Sequential(Block(), Block()), device, live=["0.router"])
    assert [live for live, _ in shown[0]] == [False, True, False]


def test_c11_what_is_to_be_recorded_counts_more(device, shown):
    torch.manual_seed(0)
    run(nn.Sequential(Block(), Block()), device, live=["aten::sort"], record=["1.router"])
    assert [live for live, _ in shown[0]] == [False, True, False]


def test_c11_a_rule_that_nothing_meets(device, shown):
    run(nn.Linear(8, 8), device, live=["aten::sort", "nowhere.*"])
    assert shown == [[]]
    assert replayed() == [4]


def test_c11_a_rule_that_names_only_what_takes_a_result_apart(device, shown):
    class Halves(Read):
        def forward(self, x):
            left, right = (self.linear(x) * 1).add_(1).chunk(2, 1)
            return left * 2, right

    run(Halves(), device, live=[lambda node: node.name == "left"])
    assert shown == [[]]
    assert replayed() == [4]


class Selected(nn.Module):
    """Works on some rows, whose number depends on data, and goes on with all."""

    def __init__(self):
        super().__init__()
        self.before, self.within = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.before(x).relu()
        rows = torch.nonzero(h.sum(1) > 1).squeeze(1)
        return torch.zeros_like(h).index_add(0, rows, self.within(h[rows])) * 2 + self.within(x)


class Read(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = self.linear(x)
        return h * h.abs().sum().item() + self.linear(x)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("rows", [(4,), (3, 4)])
def test_c11_shapes_that_depend_on_data(device, inner, rows, shown):
    torch.manual_seed(0)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run(Selected(), device, inner=inner, rows=rows, calls=12)
    assert all([live for live, _ in parts] == [False, True, False] for parts in shown)
    assert sum(replayed()) >= 16
    assert "has a shape that depends on data" in pg.explain(graphs()[0])


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_c11_numbers_that_depend_on_data(device, inner, shown):
    torch.manual_seed(0)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run(Read(), device, inner=inner)
    assert [live for live, _ in shown[0]] == [False, True, False]
    assert replayed() == [4, 4]


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="this torch release has no such tag")
def test_c11_an_operator_that_says_it_cannot_be_recorded(device, shown):
    with torch.library._scoped_library("phonograph_partition", "FRAGMENT") as library:
        library.define("odd(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
        library.impl("odd", lambda x: x * 3, "CompositeExplicitAutograd")
        torch.library.register_fake("phonograph_partition::odd", torch.empty_like, lib=library)

        class Odd(Read):
            def forward(self, x):
                return self.linear(torch.ops.phonograph_partition.odd(self.linear(x).detach()))

        run(Odd(), device)
    assert [live for live, _ in shown[0]] == [False, True, False]
    assert "cudagraph_unsafe" in pg.explain(graphs()[0])


class Crossed(nn.Module):
    """Sorts, and products beside them, in turns, which do not wait for each other. Dropout writes what it has made itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8) / 2)

    def forward(self, x):
        a = torch.sort(x, 1)[0]
        b = nn.functional.dropout(x @ self.weight)
        c = torch.sort(a * 2, 0)[0]
        d = b @ self.weight
        return c + d


def test_c11_nodes_change_places_where_there_are_fewer_parts(device, shown):
    run(Crossed(), device, live=["aten::sort", lambda node: node.name == "mul"])
    assert [live for live, _ in shown[0]] == [True, False]


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        a = torch.rand_like(x)
        b = torch.sort(torch.rand_like(x), 1)[0]
        c = torch.rand_like(x)
        d = torch.sort(torch.rand_like(x) + c, 1)[0]
        return self.linear(a * 1 + b * 2 + c * 3 + d * 4 + torch.rand_like(x) * 5)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_c02_what_is_drawn_stays_in_its_order(device, inner, shown):
    torch.manual_seed(0)
    run(Drawing(), device, live=[lambda node: "sort" in node.name or node.name == "rand_like_1"], inner=inner)
    assert [live for live, _ in shown[0]] == [False, True, False, True, False]


class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            h = self.b(torch.sort(self.a(x), 1)[0])
        with torch.no_grad():
            k = torch.sort(h, 1)[0].float().mean()
        return self.b(h.float()) + k


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_c07_blocks_in_another_mode(device, inner, shown):
    torch.manual_seed(0)
    run(Cast(), device, live=["aten::sort"], inner=inner)
    assert [live for live, _ in shown[0]] == [False, True, False, True, False]
    assert shown[0][3][1][0] == "_set_grad_enabled"


class Counting(nn.Module):
    """A buffer that is read by one part and written by another."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        h = torch.sort(x * 2 + self.seen, 1)[0]
        self.seen.add_(h[0])
        return torch.sort(self.linear(h), 1)[0] + self.seen


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_c08_a_buffer_that_a_part_writes(device, inner, shown):
    torch.manual_seed(0)
    run(Counting(), device, live=["aten::sort"], inner=inner)
    assert [live for live, _ in shown[0]] == [False, True, False, True, False]


class Scaling(nn.Module):
    """What a compiler saves for the gradients is the buffer, and not the sum."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        h = torch.sort(self.linear(x) * (self.seen + 1), 1)[0]
        self.seen.add_(1)
        return h


def test_c06_a_buffer_that_is_written_after_a_part_with_gradients_has_read_it(device):
    module = Scaling().to(device)
    fast = torch.compile(module, backend=backend, options={"inner": "aot_eager", "live": ["aten::sort"]})
    with pytest.warns(pg.RunsLive, match="may have saved for its backward"):
        fast(torch.randn(4, 8, device=device)).sum().backward()
    with torch.no_grad():  # where nothing is saved, it is split
        run(module, device, live=["aten::sort"])
    assert len(graphs()) == 2


def test_c06_statistics_that_are_written_twice(device, shown):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x):
            return self.norm(torch.sort(self.norm(x), 1)[0])

    torch.manual_seed(0)
    run(Twice(), device, live=["aten::sort"])
    assert [live for live, _ in shown[0]] == [False, True, False]


class Overwritten(nn.Module):
    """A view, and what it is a view of, both written between the sorts."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = self.linear(x) * 1
        view = h[0]
        first = torch.sort(h.detach(), 1)[0]
        h.mul_(2)
        second = torch.sort(h, 1)[0]
        view.add_(1)
        return h + first + second


@may_run_live
@pytest.mark.filterwarnings("ignore::phonograph.RunsLive")
def test_c03_parts_that_would_share_what_one_writes(device):
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(Overwritten(), device, live=["aten::sort"])
    assert any("parts would share a tensor" in str(w.message) for w in said)
    assert graphs() == []


class Viewing(nn.Module):
    """Views go from one part to the next, and are results."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = self.linear(x)
        turned = h.t()
        return turned, torch.sort(turned, 1)[0].t() + h, h[0]


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_c05_views_that_go_from_part_to_part(device, inner, shown):
    torch.manual_seed(0)
    run(Viewing(), device, live=["aten::sort"], inner=inner)
    assert [live for live, _ in shown[0]] == [False, True, False]


def test_c05_results_that_are_kept(device):
    torch.manual_seed(0)
    module = nn.Sequential(Router(), nn.Linear(8, 8), Router()).to(device)
    fast = torch.compile(module, backend=backend, options={"inner": "aot_eager", "live": ["0", "aten::sort"]})
    xs = [torch.randn(4, 8, device=device) for _ in range(8)]
    assert_same([fast(x) for x in xs], [module(x) for x in xs])
    assert replayed() == [7]


def _draws(x):
    return x + torch.rand_like(x)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("rule", ["phonograph_partition::draws", "aten::rand_like"])
def test_c02_custom_operators_stay_in_their_order(device, inner, rule, shown):
    with torch.library._scoped_library("phonograph_partition", "FRAGMENT") as library:
        library.define("draws(Tensor x) -> Tensor")  # and does not say that it does
        library.impl("draws", _draws, "CompositeExplicitAutograd")
        torch.library.register_fake("phonograph_partition::draws", torch.empty_like, lib=library)

        class Draws(Read):
            def forward(self, x):
                a = torch.rand_like(x)
                b = torch.ops.phonograph_partition.draws(x)
                return self.linear(a + 2 * b + 3 * torch.rand_like(x))

        run(Draws(), device, live=[rule], inner=inner)
    assert [live for live, _ in shown[0]] == ([False, True, False] if "draws" in rule else [True, False, True, False])


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = torch.sort(self.linear(x), 1)[0]
        return torch.cond(h.sum() > 0, lambda h: h + 1, lambda h: h - 1, (h,))


@may_run_live
@pytest.mark.filterwarnings("ignore::phonograph.RunsLive")
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_c11_operators_of_a_higher_order(device, inner):
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(Branching(), device, live=["aten::sort"], inner=inner)
    assert any("what it does cannot be told" in str(w.message) for w in said)


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = self.linear(x)
        h.register_hook(lambda g: g * 2)
        return torch.sort(h, 1)[0]


@may_run_live
@pytest.mark.filterwarnings("ignore::phonograph.RunsLive")
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_c11_hooks_on_what_goes_from_part_to_part(device, inner):
    """Dynamo ends the graph at the hook (torch 2.11), or has it in the graph, which is then not split."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(Hooked(), device, live=["aten::sort"], inner=inner)


class Counted(Selected):
    """Asks for the number of rows again, where that is a result."""

    def forward(self, x):
        h = torch.sort(self.before(x), 1)[0]
        rows = torch.nonzero(h > 0)
        n = rows.shape[0]
        return (torch.zeros(n, 8, device=x.device) + self.within(h[rows[:, 0]])).sum(0) * n + self.within(h)


@may_run_live
@pytest.mark.filterwarnings("ignore::phonograph.RunsLive")
def test_c11_a_size_without_a_name(device):
    torch.manual_seed(0)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(Counted(), device, live=["aten::sort"], record=["aten::nonzero"], inner="eager")
    assert any("cannot be split where" in str(w.message) for w in said)


class Pieces(nn.Module):
    """Writes some of what it has made."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = self.linear(x) * 1
        h[:, :2] = 0
        h[h > 1] = 1.0
        return torch.sort(h + 0, 1)[0]


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_c11_items_that_are_set(device, inner, shown):
    torch.manual_seed(0)
    run(Pieces(), device, live=["aten::sort"], inner=inner)
    assert [live for live, _ in shown[0]] == [False, True]


class Doubled(nn.Module):
    """One of its arguments is a tensor of another kind, whose views nobody sees."""

    def forward(self, x, y):
        z = y * 1
        view = z.view(8, 4)
        k = torch.sort(x, 1)[0]
        view.add_(1)
        return z * 2 + k, view


@may_run_live
@pytest.mark.filterwarnings("ignore::phonograph.RunsLive")
def test_c03_tensors_of_other_kinds(device):
    from torch.testing._internal.two_tensor import TwoTensor

    module = Doubled()
    rules = [lambda node: node.name in ("add_", "mul"), "aten::sort"]
    fast = torch.compile(module, backend=backend, options={"inner": "aot_eager", "live": rules})
    said = []
    for _ in range(3):
        x, y = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
        pair = TwoTensor(y, y * 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = fast(x, pair)
        said += [str(w.message) for w in caught]
        assert_same([(t.a, t.b) for t in ours], [(t.a, t.b) for t in module(x, pair)])
    assert any("of other kinds" in message for message in said)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no cuda device")
def test_c11_tensors_on_the_host(cuda, shown):
    class Mixed(Read):
        def forward(self, x):
            h = self.linear(x)
            return h * (torch.arange(8) * 2).to(x.device) + self.linear(h)

    torch.manual_seed(0)
    run(Mixed(), cuda, live=["aten::nothing"], inner="eager")
    assert True in [live for live, _ in shown[0]]
    assert set(replayed()) == {4}


@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_c11_parts_that_inductor_compiles(cuda, shown, monkeypatch):
    import torch._inductor.config

    monkeypatch.setattr(torch._inductor.config, "fallback_random", True)  # its dropout draws what eager's does
    torch.manual_seed(0)
    module = nn.Sequential(Block(), Block()).to(cuda).eval()
    fast = torch.compile(module, backend=backend, options={"live": ["*.router"]})
    for n in range(5):
        x = torch.randn(4, 8, device=cuda)
        module.zero_grad()
        torch.manual_seed(n)
        y = fast(x)
        y.square().sum().backward()
        grads = [p.grad.clone() for p in module.parameters()]
        module.zero_grad()
        torch.manual_seed(n)
        expected = module(x)
        expected.square().sum().backward()
        torch.testing.assert_close((y, grads), (expected, [p.grad for p in module.parameters()]), rtol=1e-3, atol=1e-4)
    assert [live for live, _ in shown[0]] == [False, True, False, True, False]
    assert replayed() == [4, 4, 4]


@pytest.mark.parametrize("faster", ["played", "live"])
def test_c20_without_gradients_a_part_is_played_only_if_that_is_faster(device, faster, monkeypatch):
    class Clock(paying.Clock):
        def times(self, took):
            host, _ = super().times(took) or (0.0, 0.0)
            seen.append(host)
            return (1e-6 if took.live is (faster == "live") else 2e-6), 0.0

    seen = []
    monkeypatch.setattr(paying, "clock", Clock())
    torch.manual_seed(0)
    sides = Sides(nn.Sequential(Block(), Block()).to(device), live=["*.router"])

    def call(times):
        before = sum(replayed())
        with torch.no_grad():
            for n in range(times):
                sides(torch.randn(4, 8, device=device), seed=n)
        return sum(replayed()) - before

    assert call(1 + 2 * measured.SAMPLES) == 3 * measured.SAMPLES
    assert len(seen) >= 3 * 2 * measured.SAMPLES - 3
    assert call(3) == (9 if faster == "played" else 0)
    said = f"a replay takes {2 if faster == 'live' else 1} us and the function itself"
    assert all((f"runs live without gradients: {said}" in pg.explain(graph)) == (faster == "live") for graph in graphs())
    before = sum(replayed())
    for _ in range(2):  # with gradients, whatever was measured
        sides(torch.randn(4, 8, device=device))
    assert sum(replayed()) - before == 3


def test_c14_threads_that_measure_at_once_come_to_an_end(device):
    sides = Sides(Router().to(device), live=["aten::sort"])
    with torch.no_grad():
        for _ in range(3):
            sides(torch.randn(4, 8, device=device))
        gc.collect()
        (measuring,) = [x for x in gc.get_objects() if type(x) is measured.Measured and x._samples.count(False)]
        for live in (True, False):  # two threads have noted theirs before either has looked how many there are
            for _ in range(measured.SAMPLES + 1):
                took = paying.Took(device)
                took.end()
                took.live = live
                measuring._samples.add(took)
        sides(torch.randn(4, 8, device=device))
        sides(torch.randn(4, 8, device=device))
    assert measuring._call is not None


def test_c18_recordings_go_with_the_model(device):
    model = nn.Sequential(Block(), Block()).to(device)
    fast = torch.compile(model, backend=backend, options={"inner": "aot_eager", "live": ["*.router"]})
    for _ in range(3):
        fast(torch.randn(4, 8, device=device)).sum().backward()
    assert len(graphs()) == 3
    refs = [weakref.ref(graph) for graph in graphs()]
    torch._dynamo.reset()
    del fast, model
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


@pytest.mark.parametrize("rules", ["aten::sort", 3, [3], [None]])
def test_c19_rules_are_checked(rules):
    fast = torch.compile(nn.Linear(2, 2), backend=backend, options={"live": rules})
    with pytest.raises(Exception, match="live takes"):
        fast(torch.randn(1, 2))
