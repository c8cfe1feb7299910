"""What the nodes of a captured graph touch, and what becomes of a graph that is wired anew. (No GPU is asked: programs run on
the CPU, operator by operator, in any order that is allowed.)
"""

import ctypes
import gc
import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from phonograph.aten.operators import meaning, tensors_in
from phonograph.devices.cuda import driver, laned, places, rewired
from phonograph.devices.cuda.laned import LanedProgram, Order, Trial, largest_once, takes_too_much
from phonograph.devices.cuda.places import LIBRARIES, Blocks, Given, Notebook, Noted, lifetimes, note, placed
from phonograph.devices.cuda.rewired import Rewired, plain_edges
from phonograph.devices.order import Node, dependencies, peak, unordered
from phonograph.memory.spans import Spans

aten = torch.ops.aten
NO_BLOCKS = Blocks([], lambda word: None)
NOTHING_ELSE = Given([8])  # a word that is no address


def noted(func, *args, out=None, **kwargs):
    """What is noted of an operator that is called so."""
    out = func(*args, **kwargs) if out is None else out
    return note(meaning(func), args, kwargs, out, 0, 1, (0, 0)), out


def lies(t):
    return t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()


# -- what an operator touches


def test_an_operator_reads_its_arguments_and_writes_its_result():
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    found, out = noted(aten.mm.default, a, b)
    assert (found.reads, found.writes, found.made) == ((lies(a), lies(b)), (lies(out),), (out.data_ptr(),))
    assert found.known


def test_what_the_schema_says_is_written():
    a, b = torch.ones(3), torch.ones(3)
    found, _ = noted(aten.add_.Tensor, a, b)
    assert found.reads == (lies(a), lies(b))
    assert {*found.writes} == {lies(a)}
    assert found.made == ()
    found, _ = noted(aten._foreach_add_.List, [a, b], [b, b])
    assert {*found.writes} == {lies(a), lies(b)}
    found, _ = noted(aten.mul.out, a, b, out=a)
    assert {*found.writes} == {lies(a)}


def test_running_statistics_are_written_which_the_schema_does_not_say():
    x, mean, var = torch.ones(2, 3), torch.zeros(3), torch.ones(3)
    training, _ = noted(aten.native_batch_norm.default, x, None, None, mean, var, True, 0.1, 1e-5)
    assert {lies(mean), lies(var)} <= {*training.writes}
    judging, _ = noted(aten.native_batch_norm.default, x, None, None, mean, var, False, 0.1, 1e-5)
    assert not {lies(mean), lies(var)} & {*judging.writes}


def test_a_view_is_read_where_it_lies_and_a_part_of_a_new_result_is_written_whole():
    rows = torch.ones(8, 4)
    found, _ = noted(aten.add_.Tensor, rows[2:4], 1)
    assert {*found.writes} == {(rows.data_ptr() + 2 * 16, 2 * 16)}
    found, _ = noted(aten.neg.default, rows[0], out=(large := torch.ones(100))[10:14])
    assert found.writes == (lies(large),)


@pytest.mark.parametrize("name", ["linalg_cholesky_ex", "_cudnn_rnn", "_fft_r2c", "lu_unpack", "triangular_solve"])
def test_what_may_keep_something_elsewhere_is_not_known(name):
    assert places._keeps(f"aten::{name}")


@pytest.mark.parametrize(
    "name",
    [
        "relu_",
        "gelu_backward",
        "native_layer_norm",
        "_fused_adam_",
        "mm",
        "linalg_vector_norm",
        "_thnn_fused_gru_cell_backward",
    ],
)
def test_what_only_sounds_like_it_is(name):
    assert not places._keeps(f"aten::{name}")


# -- temporary memory


@pytest.fixture
def allocator(monkeypatch):
    """Takes and gives back, the lowest free number first."""
    there = []

    def take(nbytes, stream):
        there.append(next(at for at in range(100) if at not in there))
        return there[-1]

    monkeypatch.setattr(places.torch_cuda, "raw_alloc", take)
    monkeypatch.setattr(places.torch_cuda, "raw_free", there.remove)
    monkeypatch.setattr(places.torch_cuda, "raw_stream", lambda device: 7)
    return there


def test_the_last_workspaces_are_taken(allocator):
    taken = places.Taken(0)
    for _ in range(20):
        taken.take(1 << 20)
    assert len(allocator) == 8
    taken.take(8 << 20)  # too large
    taken.take(0)
    assert len(allocator) == 8
    taken.release()
    taken.release()
    assert allocator == []


def test_who_goes_gives_back_what_it_has_taken(allocator):
    taken = places.Taken(0)
    taken.take(512)
    del taken
    gc.collect()
    assert allocator == []


# -- what a node touches


def test_a_word_that_no_operator_accounts_for_stands_for_its_whole_block():
    operator = Noted("aten::mm", 0, 1, reads=((1000, 8),), writes=((2000, 8),))
    blocks = Blocks([(1 << 30, 512), ((1 << 30) + 256, 512), (1000, 500)], lambda word: (1 << 40, 64) if word >> 40 else None)
    (node,) = placed([Given([1000, 2004, (1 << 30) + 700, 1 << 40, 12345, 1 << 25])], [operator], [], blocks)
    assert [*node.reads] == [(1000, 8), (1 << 30, 768), (1 << 40, 64)]
    assert [*node.writes] == [(2000, 8), (1 << 30, 768), (1 << 40, 64)]


def test_a_word_beside_what_an_operator_accounts_for_stands_for_the_block():
    operator = Noted("aten::mm", 0, 1, reads=((1000, 8),))
    (node,) = placed([Given([1008])], [operator], [], Blocks([(1000, 500)], lambda word: None))
    assert [*node.writes] == [(1000, 500)]


def test_only_what_looks_like_an_address_is_asked_for_and_once():
    asked = []
    blocks = Blocks([], asked.append)
    for word in (0, 64, 1 << 40, 1 << 40):
        assert blocks.at(word) is None
    assert asked == [1 << 40]


def test_what_an_operator_allocates_for_itself_it_may_write():
    operator = Noted("aten::sort", 0, 1, writes=((2000, 8),), allocated=(1, 3))
    (node,) = placed([NOTHING_ELSE], [operator], [(500, 9), (2000, 8), (3000, 16)], NO_BLOCKS)
    assert [*node.writes] == [(2000, 8), (3000, 16)]


def test_what_is_not_known_may_touch_anything():
    known, strange = Noted("aten::mm", 0, 4), Noted("mine::mm", 4, 5, known=False)
    given = [NOTHING_ELSE, Given(None), Given([8], end=True), Given([]), NOTHING_ELSE, NOTHING_ELSE]
    nodes = placed(given, [known, strange], [], NO_BLOCKS)
    assert [node.everything for node in nodes] == [False, True, True, False, True, True]
    assert nodes[3].idle
    assert nodes[5].name == "node 5 (no operator)"


def test_the_innermost_operator_counts():
    inner, outer = Noted("aten::mm", 1, 2), Noted("aten::linear", 0, 3)
    names = [node.name for node in placed([NOTHING_ELSE] * 3, [inner, outer], [], NO_BLOCKS)]
    assert names == ["node 0 (aten::linear)", "node 1 (aten::mm)", "node 2 (aten::linear)"]


def test_kernels_of_libraries_stay_in_their_order():
    operators = [Noted("aten::convolution", i, i + 1, writes=((i * 100, 8),)) for i in range(4)]
    kernels = [b"sm90_xmma_gemm", b"_ZN2at6native29vectorized", b"nvjet_hsh", b"?"]
    nodes = placed([Given([8], kernel) for kernel in kernels], operators, [], NO_BLOCKS)
    assert dependencies(nodes) == [(0, 2), (2, 3)]
    assert [*LIBRARIES] == [(-1, 1)]


def test_products_wait_for_each_other_where_their_words_meet():
    """In a workspace, of which most make no use."""
    workspace, given = (1 << 30, 1 << 20), [1 << 30, 8, (1 << 30) + 512]
    operators = [Noted(f"aten::{name}", i, i + 1, writes=((i * 100, 8),)) for i, name in enumerate(["mm", "addmm", "bmm"])]
    nodes = placed([Given([word], b"nvjet_hsh") for word in given], operators, [], Blocks([workspace], lambda word: None))
    assert dependencies(nodes) == [(0, 2)]
    assert dependencies(placed([Given(None, b"nvjet_hsh")] * 3, operators, [], NO_BLOCKS)) == [(0, 1), (1, 2)]


def test_a_product_touches_of_what_it_allocates_what_it_is_given():
    results, workspace = [(1000, 8), (2000, 8)], (1 << 30, 1 << 20)
    operators = [Noted("aten::addmm", i, i + 1, writes=(results[i],), allocated=(2 * i, 2 * i + 2)) for i in range(2)]
    allocated = [results[0], workspace, results[1], workspace]

    def edges(*words):
        return dependencies(placed([Given([word], b"nvjet_hsh") for word in words], operators, allocated, NO_BLOCKS))

    assert edges(8, 1 << 30) == []
    assert edges(1 << 30, (1 << 30) + 512) == [(0, 1)]


def test_an_address_means_the_block_that_was_there_at_the_time():
    """Memory is given to others, which begin and end elsewhere."""
    allocated = [(1 << 30, 1000), ((1 << 30) + 500, 1000), (1 << 30, 100)]
    operators = [Noted("aten::neg", i, i + 1, allocated=(i, i)) for i in range(4)]

    def read(word):
        return [[*node.reads] for node in placed([Given([(1 << 30) + word])] * 4, operators, allocated, NO_BLOCKS)]

    first, second, third, everything = *([one] for one in allocated), [(1 << 30, 1500)]
    assert read(600) == [everything, first, second, second]
    assert read(50) == [everything, first, first, third]
    assert read(200) == [everything, first, first, first]
    assert read(1200) == [everything, everything, second, second]
    assert read(1600) == [[], [], [], []]


def test_time_goes_by_what_an_operator_is_given_and_makes():
    operator = Noted("aten::mm", 0, 1, reads=((1000, 8), (1000, 8)), writes=((2000, 16),))
    (node,) = placed([Given([1 << 30], b"nvjet_hsh")], [operator], [], Blocks([(1 << 30, 1 << 25)], lambda word: None))
    assert node.nbytes == 24


def test_what_was_allocated_is_numbered_by_the_last_ones():
    book = object.__new__(Notebook)
    book._noted, book._ended = [Noted("a", 0, 1, allocated=(101, 103), made=(32,))], 103
    assert [one.allocated for one in book.noted([(0, 8), (16, 8), (32, 8)])] == [(1, 3)]
    assert book.noted([(0, 8), (32, 8), (16, 8)]) is not None
    assert book.noted([(32, 8), (0, 8), (16, 8)]) is None  # it was not made there
    assert book.noted([(32, 8)]) is None


def test_blocks_are_in_use_from_their_allocation_to_the_last_operator_that_is_given_them():
    operators = [
        Noted("a", 0, 1, allocated=(0, 2), writes=((0, 512),)),
        Noted("b", 1, 2, reads=((256, 8),), allocated=(2, 3)),
        Noted("c", 2, 3, reads=((700, 8),), allocated=(3, 4)),  # in memory that was another's before
    ]
    allocated = [(0, 512), (512, 512), (1024, 512), (512, 1024)]
    blocks = lifetimes(operators, allocated)
    assert [(b.nbytes, b.users) for b in blocks] == [(512, (0, 0, 1)), (512, (0,)), (512, (1,)), (1024, (2, 2))]
    assert peak(blocks) == 1024


# -- real programs, in other orders


class Tape(TorchDispatchMode):
    """The operators of a program, all of whose memory is kept."""

    def __init__(self):
        super().__init__()
        self.calls, self.noted = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        one = note(meaning(func), args, kwargs or {}, out, len(self.calls), len(self.calls) + 1, (0, 0))
        self.calls.append((func, args, kwargs or {}, [t for t in tensors_in((out,), []) if t.data_ptr() in one.made]))
        self.noted.append(one)
        return out

    @property
    def nodes(self):
        return placed([NOTHING_ELSE] * len(self.calls), self.noted, [], NO_BLOCKS)

    def call(self, number):
        """Do it again, in the same memory."""
        func, args, kwargs, results = self.calls[number]
        found = tensors_in((func(*args, **kwargs),), [])
        for result in results:
            result.copy_(next(t for t in found if t.shape == result.shape and t.dtype == result.dtype))
            found = found[1:]


def in_some_order(draw, count, edges):
    """One of the orders that edges allow, drawn."""
    before = [{a for a, b in edges if b == node} for node in range(count)]
    done, left = [], {*range(count)}
    while left:
        done.append(draw.choice([node for node in sorted(left) if before[node] <= {*done}]))
        left.remove(done[-1])
    return done


def mlp(*sizes):
    layers = [layer for i, o in pairwise(sizes) for layer in (torch.nn.Linear(i, o), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers[:-1])


def actor_and_critic():
    actor, critic, x = mlp(5, 8, 8, 2), mlp(5, 8, 8, 1), torch.randn(6, 5)
    params = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(params, foreach=True, capturable=False)

    def step():
        optimizer.zero_grad()
        loss = (actor(x) ** 2).mean() + 0.5 * ((critic(x).squeeze(1) - x.sum(1)) ** 2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        return loss.detach()

    return step, params


def convolutions():
    conv = torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(inplace=True)
    net = torch.nn.Sequential(*conv, torch.nn.Flatten(), torch.nn.Linear(64, 3))
    x, y = torch.randn(4, 2, 6, 6), torch.randint(0, 3, (4,))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, [*net.parameters(), *net.buffers()]


def attention():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    emb, x = torch.nn.Embedding(10, 8), torch.randint(0, 10, (2, 5))
    params = [*layer.parameters(), *emb.parameters()]
    optimizer = torch.optim.AdamW(params, fused=True)

    def step():
        optimizer.zero_grad()
        loss = layer(emb(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, params


def targets():
    """In-place updates of views, and an average of what others write."""
    q, target = mlp(4, 8, 1), mlp(4, 8, 1)
    x, buffer = torch.randn(6, 4), torch.zeros(3, 6)

    def step():
        with torch.no_grad():
            buffer[1:].copy_(buffer[:-1].clone())
            buffer[0] = q(x).squeeze(1)
            torch._foreach_lerp_([*target.parameters()], [*q.parameters()], 0.1)
            for p in q.parameters():
                p.mul_(0.9).add_(target(x).mean())
            return buffer.sum(0)

    return step, [*q.parameters(), *target.parameters(), buffer]


@pytest.mark.parametrize("program", [actor_and_critic, convolutions, attention, targets])
def test_operators_in_any_order_that_is_allowed_give_the_same(program):
    torch.manual_seed(0)
    draw, (step, state) = random.Random(0), program()
    step(), step()  # an optimizer has its state then
    for t in state:
        t.grad = None
    before = [t.detach().clone() for t in state]
    with Tape() as tape:
        out = step()
    nodes, edges = tape.nodes, dependencies(tape.nodes)
    assert [*unordered(nodes, edges)] == []
    for gone in draw.sample(edges, 25):
        assert gone in {*unordered(nodes, [edge for edge in edges if edge != gone])}
    others = [t for one in tape.calls for t in tensors_in(one[1], [])]
    own = {t.data_ptr() for *_, results in tape.calls for t in results}
    first = {t.untyped_storage().data_ptr(): t for t in others if t.untyped_storage().data_ptr() not in own}
    with torch.no_grad():
        now = {at: t.detach().untyped_storage().clone() for at, t in first.items()}  # an optimizer's state is among it

        def run(order):
            for at, t in first.items():
                t.detach().untyped_storage().copy_(now[at])
            for t, was in zip(state, before, strict=True):
                t.copy_(was)
            for number in order:
                tape.call(number)
            return [out.clone(), *(t.detach().clone() for t in state)]

        expected = run(range(len(nodes)))
        orders = [in_some_order(draw, len(nodes), edges) for _ in range(10)]
        assert all(order != sorted(order) for order in orders)
        for order in orders:
            assert all(map(torch.equal, run(order), expected))
        assert not all(map(torch.equal, run(in_some_order(draw, len(nodes), [])), expected))


# -- another wiring


class Driver:
    """A graph of three nodes in a row, and what is asked of it."""

    def __init__(self):
        self.kinds, self.calls, self.fails = (0, 0), [], ""
        self.removed, self.added, self.gone = [], [], []
        self.does = {
            "cuGraphGetEdges_v2": self.edges,
            "cuGraphClone": self.gives(9),
            "cuGraphNodeFindInClone": lambda made, node, graph: self.gives(node + 10)(made),
            "cuGraphRemoveDependencies_v2": self.notes(self.removed),
            "cuGraphAddDependencies_v2": self.notes(self.added),
            "cuGraphInstantiateWithFlags": self.gives(77),
            "cuGraphExecDestroy": self.gone.append,
            "cuGraphDestroy": self.gone.append,
            "cuThreadExchangeStreamCaptureMode": lambda mode: 0,
        }

    def function(self, name, *types):
        return lambda *args: 1 if name == self.fails else self.does[name](*args) or 0

    def edges(self, graph, before, after, kinds, count):
        count._obj.value = 2
        for i in range(2 if before is not None else 0):
            before[i], after[i], kinds[i] = 11 + i + (graph == 9) * 10, 12 + i + (graph == 9) * 10, self.kinds[i]

    def gives(self, number):
        def give(made, *_):
            made._obj.value = number

        return give

    def notes(self, pairs):
        return lambda graph, before, after, kinds, count: pairs.extend(zip(before, after, strict=True))


@pytest.fixture
def cuda_driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(driver, "function", fake.function)
    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(cuGraphGetEdges_v2=None))
    return fake


def test_a_copy_of_a_graph_is_wired_anew(cuda_driver):
    made = Rewired(5, [11, 12, 13], [(0, 2), (1, 2)])
    assert cuda_driver.removed == [(21, 22), (22, 23)]
    assert cuda_driver.added == [(21, 23), (22, 23)]
    assert (made.executable, made.node(12)) == (77, 22)
    made.close()
    made.close()
    assert cuda_driver.gone == [77, 9]


@pytest.mark.parametrize("fresh", [True, False])
def test_a_graph_that_was_launched_is_given_all_addresses(monkeypatch, fresh):
    """Also those that it was captured with: it may have others by now."""
    cell, put = ctypes.c_uint64(100), []
    copy = SimpleNamespace(words=lambda: [cell], putter=lambda executable: lambda: put.append(cell.value) or 0)
    monkeypatch.setattr(driver, "kind", lambda node: driver.KERNEL)
    monkeypatch.setattr(driver, "_COPIES", {driver.KERNEL: lambda node: copy})
    pointers = driver.Pointers(1, {5}, [100], fresh=fresh)
    pointers.set([100])
    assert put == ([] if fresh else [100])
    pointers.set([200])
    pointers.set([200])
    assert put[-1:] == [200]
    assert len(put) == 2 - fresh


@pytest.mark.parametrize("fails", ["cuGraphRemoveDependencies_v2", "cuGraphAddDependencies_v2", "cuGraphInstantiateWithFlags"])
def test_a_copy_that_cannot_be_wired_goes(cuda_driver, fails):
    cuda_driver.fails = fails
    with pytest.raises(driver.DriverError):
        Rewired(5, [11, 12, 13], [(0, 2)])
    assert cuda_driver.gone == [9]


def test_edges_by_which_a_kernel_may_begin_early_are_left_alone(cuda_driver):
    assert plain_edges(5) == [(11, 12), (12, 13)]
    cuda_driver.kinds = (0, 1 << 16)
    assert plain_edges(5) is None


def test_a_driver_that_does_not_tell_of_edges_is_not_asked(monkeypatch):
    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace())
    with pytest.raises(driver.DriverError):
        rewired.plain_edges(5)


def test_words_are_found_in_structures_without_gaps(monkeypatch):
    raw = (7).to_bytes(4, "little") + (1 << 40).to_bytes(8, "little")
    kernels = {1: [ctypes.create_string_buffer(raw, len(raw)), ctypes.create_string_buffer(b"1234", 4)], 2: []}
    monkeypatch.setattr(driver, "_Kernel", lambda node: SimpleNamespace(buffers=kernels[node]))
    monkeypatch.setattr(driver, "kind", lambda node: {1: 0, 2: 0, 3: 5, 4: 3, 5: 4}[node])
    monkeypatch.setattr(driver, "_in_one_piece", lambda node: [])
    assert 1 << 40 in driver.words_anywhere(1)
    assert [driver.words_anywhere(node) for node in (2, 3, 4, 5)] == [None, [], None, None]


@pytest.mark.parametrize("given", ["singly", "in one piece", "without an end", "not at all"])
def test_words_are_found_in_parameters_that_were_given_in_one_piece(monkeypatch, given):
    data = ctypes.create_string_buffer((7).to_bytes(4, "little") + (1 << 40).to_bytes(8, "little"), 12)
    size = ctypes.c_size_t(12)
    start, many = ctypes.addressof(data), ctypes.addressof(size)
    rows = {
        "in one piece": (2, many, 1, start, 0),
        "without an end": (1, start, 2, many, 5),
        "not at all": (0,),
        "singly": (1,),
    }
    row = (ctypes.c_void_p * 5)(*rows[given])

    def get(node, params):
        params._obj.extra = ctypes.addressof(row)
        if given == "singly":
            params._obj.params = ctypes.cast(row, ctypes.POINTER(ctypes.c_void_p))

    monkeypatch.setattr(driver, "function", lambda name, *types: get)
    found = driver._in_one_piece(1)
    assert found == ([data.raw] if given in ("in one piece", "without an end") else [])


# -- the trial


def tried(times, nodes=None, fails=()):
    """What a program has come to whose runs take these times by the number of lanes (0: as captured); and what it launches."""
    program, now = object.__new__(LanedProgram), [0]
    program._graph = SimpleNamespace(raw_cuda_graph=lambda: 5, raw_cuda_graph_exec=lambda: "captured")
    program._changed = program._results = []
    program._device = 0

    def wired(order, lanes):
        if lanes in fails:
            raise driver.DriverError("cuGraphInstantiate failed with CUresult 2")
        return SimpleNamespace(executable=lanes, node=int)

    def use(executable, node=int, *, fresh):
        assert not fresh  # trials have launched it
        now[0] = executable

    program._wired, program._use = wired, use
    trial = SimpleNamespace(time=lambda: times[0 if now[0] in (0, "captured") else now[0]])
    nodes = nodes or [Node("a"), Node("b")]
    try:
        program.edges = program._best(Order([1, 2], nodes, [1.0, 1.0], []), trial)
    except driver.DriverError:
        program._wire(None)
    return program, now[0]


def test_the_fastest_is_kept():
    program, launches = tried({0: 100.0, 2: 90.0, 3: 80.0, 4: 70.0, 6: 75.0, 8: 76.0})
    assert launches == 4
    assert program.edges == ("true: 100.0 us as captured, 2 lanes 90.0 us, 3 lanes 80.0 us, 4 lanes 70.0 us, 6 lanes 75.0 us, "
                             "8 lanes 76.0 us (2 nodes, 1 deep, 2 wide; of 0 nobody knows what they touch)")  # fmt: skip


def test_what_is_faster_by_noise_alone_is_not():
    program, launches = tried({0: 100.0, 2: 99.0, 3: 98.0, 4: 100.0, 6: 120.0, 8: 98.0})
    assert launches == "captured"
    assert program.edges.startswith("as captured: 100.0 us")


@pytest.mark.parametrize("other", [3, 6])
def test_one_other_result_is_enough(other, caplog):
    program, launches = tried({0: 100.0, 2: 50.0, 3: 50.0, 4: 50.0, 6: 50.0, 8: 50.0} | {other: None})
    assert launches == "captured"
    assert f"{other} lanes differ" in program.edges
    assert "gave another result" in caplog.text
    caplog.clear()  # which is a failure of our own, and none of this test's


def test_what_differs_from_run_to_run_is_left_as_it_is():
    program, launches = tried({0: None})
    assert launches == 0
    assert program.edges.startswith("as captured")


def test_a_driver_that_fails_leaves_the_chain():
    _, launches = tried({0: 100.0, 2: 50.0}, fails={3})
    assert launches == "captured"


def test_a_graph_that_the_checker_does_not_pass_is_not_made(monkeypatch):
    program = object.__new__(LanedProgram)
    program._graph = SimpleNamespace(raw_cuda_graph=lambda: 5)
    both = [Node(name, writes=Spans([(0, 8)])) for name in "ab"]
    with pytest.raises(driver.DriverError, match="a and b touch the same memory"):
        program._wired(Order([1, 2], both, [1.0, 1.0], []), 2)  # an edge is missing


@pytest.fixture
def no_events(monkeypatch):
    """Each run takes as many microseconds as events were recorded before it."""
    count = iter(range(1000))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(count)

        def synchronize(self):
            """It is there."""

        def elapsed_time(self, end):
            return (end.at - self.at) * 1e-3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(laned, "occupy", lambda cycles: None)


def bytes_of(t):
    return t.view(-1).view(torch.uint8)


def trial_of(step, state, scratch):
    """A trial of a step that changes the state, makes its results in that memory, and gives a copy of them."""

    def run():
        step()
        return [scratch.clone()]

    return Trial(run, [bytes_of(state)], [bytes_of(scratch)], [bytes_of(scratch)])


def test_each_run_of_a_trial_begins_where_the_program_stands(no_events):
    state, scratch, seen = torch.tensor([3.0]), torch.zeros(2), []

    def step():
        seen.append(state.item())
        scratch[0] = state[0] * 2
        scratch[1] = scratch[0] + 1
        state.add_(1)

    trial = trial_of(step, state, scratch)
    assert trial.time() == pytest.approx(1.0)
    assert trial.time() == pytest.approx(1.0)
    trial.put_back()
    assert (state.item(), {*seen}, len(seen)) == (3.0, {3.0}, 14)


def test_what_the_run_before_has_left_is_no_help(no_events):
    """Two nodes in the wrong order: the first finds what the second has made in the run before."""
    state, scratch, wrong = torch.tensor([3.0]), torch.zeros(2), []

    def first():
        scratch[0] = state[0] * 2

    def then():
        scratch[1] = scratch[0] + 1

    def step():
        for node in (then, first) if wrong else (first, then):
            node()

    trial = trial_of(step, state, scratch)
    assert trial.time() is not None
    wrong.append(True)
    assert trial.time() is None


def test_a_bit_that_changes_what_lies_outside_is_another_result(no_events):
    state, scratch, more = torch.tensor([0.5]), torch.zeros(2), [0.0]
    trial = trial_of(lambda: state.add_(more[0]), state, scratch)
    assert trial.time() is not None
    more[0] = 2**-25
    assert trial.time() is not None  # which a float32 does not hold
    more[0] = 2**-24
    assert trial.time() is None
    more[0] = float("nan")
    assert trial.time() is None


# -- memory that is used once


def in_a_row(count, nbytes):
    """A notebook of operators each of which reads what the last has made; and what they have allocated."""
    book = object.__new__(Notebook)
    ranges = [(i * nbytes, nbytes) for i in range(count)]
    book._noted = [
        Noted(
            "aten::mul",
            i,
            i + 1,
            reads=(*ranges[max(0, i - 1) : i],),
            writes=(ranges[i],),
            allocated=(i, i + 1),
            made=(ranges[i][0],),
        )
        for i in range(count)
    ]
    book._ended = count
    return book, ranges


@pytest.mark.parametrize(("count", "mib", "much"), [(2, 512, False), (3, 512, True), (18, 2, False), (19, 2, True)])
def test_much_more_memory_than_a_chain_takes_is_too_much(count, mib, much):
    """A chain takes two results at a time. 32 MiB more are no matter."""
    assert takes_too_much(*in_a_row(count, mib << 20)) == much


def test_the_smallest_results_have_memory_that_is_used_once():
    book, ranges = in_a_row(30, 2 << 20)
    assert largest_once(book, ranges) == 0
    for i in range(0, 30, 3):  # some are smaller
        ranges[i] = (ranges[i][0], 1 << 20)
    assert largest_once(book, ranges) == 1 << 20
    assert takes_too_much(book, ranges)


def test_memory_of_an_operators_own_that_is_used_again_counts_once():
    book = object.__new__(Notebook)
    book._noted, book._ended = [Noted("aten::mm", i, i + 1, allocated=(i, i + 1)) for i in range(50)], 50
    assert not takes_too_much(book, [(0, 32 << 20)] * 50)
