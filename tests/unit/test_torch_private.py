"""What torch keeps to itself still says what it said."""

import _thread
import ctypes
import sys
import threading
import types
import warnings
from functools import partial

import pytest
import torch
from torch.utils import checkpoint

from phonograph._torch import autograd as torch_autograd
from phonograph._torch import cuda as torch_cuda
from phonograph._torch import dynamo as torch_dynamo


def test_inductors_code_says_what_it_writes():
    path, called = torch_dynamo.COMPILED_GRAPH
    found = []

    def hear(frame, event, _):
        if event == "call" and frame.f_code.co_name == called and frame.f_code.co_filename.endswith(path):
            found.append(torch_dynamo.written_by_graph(frame))

    @torch.compile
    def function(written, read):
        written.add_(read)
        return written * 2

    written, read = torch.zeros(4), torch.ones(4)
    try:
        function(written, read)
        sys.setprofile(hear)
        function(written, read)
    finally:
        sys.setprofile(None)
        torch._dynamo.reset()
    ((only,),) = found
    assert only.data_ptr() == written.data_ptr()


@pytest.mark.parametrize("options", [None, {"kernel_name_max_ops": 3, "max_autotune": False}])
def test_what_inductor_compiles_for_the_backend_has_keys_of_its_own_in_its_cache(monkeypatch, options):
    """Its keys do not say whether a backward may write what was saved, and others' may."""
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    asked = []

    def compiling(gm, inputs, *, config_patches):
        asked.append((config_patches, torch._functorch.config.donated_buffer))
        return gm

    monkeypatch.setattr(torch._dynamo, "lookup_backend", {"inductor": compiling}.__getitem__)
    torch_dynamo.compiled_by("inductor", torch.fx.symbolic_trace(torch.nn.ReLU()), [], options)
    ((patches, donated),) = asked
    usual = (options or {}).get("kernel_name_max_ops", torch._inductor.config.kernel_name_max_ops)
    assert patches["kernel_name_max_ops"] != usual
    assert patches["kernel_name_max_ops"] != torch._inductor.config.kernel_name_max_ops
    assert not donated
    assert "kernel_name_max_ops" in torch._inductor.config.save_config_portable()  # of which the keys are made


def test_a_view_like_another():
    with torch_autograd.original_views():
        mould = torch.zeros(4, 6).t()[1:]
    base = torch.arange(24.0).reshape(4, 6).requires_grad_() * 1
    view = torch_autograd.view_like(mould, base)
    assert view._base is base
    assert torch.equal(view, base.t()[1:])
    assert type(view.grad_fn) is type(base.t()[1:].grad_fn)  # by the same functions, and not by as_strided
    with pytest.raises(ValueError, match="no such view"):
        torch_autograd.view_like(mould, base.t())


def test_whether_tensors_share_their_version():
    x = torch.ones(3)
    x.add_(1)
    assert torch_autograd.share_version(x, x.detach())
    assert torch_autograd.share_version(x[1:], x)
    assert not torch_autograd.share_version(x, x.data)
    assert not torch_autograd.share_version(torch.ones(3), torch.ones(3))
    assert x._version == 1  # as it was


def test_kernels_are_measured_outside_of_pools(monkeypatch):
    """Inductor takes memory to empty the GPU's cache between its measurements; a pool would keep it."""
    routed, calls = [], []

    class CachingAutotuner:
        def bench(self, launcher, *, with_profiler=False):
            calls.append((launcher, with_profiler, [*routed]))
            if launcher == "fails":
                raise KeyError(launcher)
            return 3.0

    def private(name):
        def begin(device, pool):
            routed.append((device, pool))

        def end(device, pool):
            routed.remove((device, pool))

        return {"_cuda_beginAllocateCurrentStreamToPool": begin, "_cuda_endAllocateToPool": end}.get(name, lambda *_: None)

    heuristics = types.SimpleNamespace(CachingAutotuner=CachingAutotuner)
    monkeypatch.setitem(sys.modules, "torch._inductor.runtime.triton_heuristics", heuristics)
    monkeypatch.setattr(torch_cuda, "_c", private)
    streams = {0: 7, 1: 8}
    monkeypatch.setattr(torch_cuda, "raw_stream", streams.get)
    for _ in range(2):  # the second time changes nothing
        torch_cuda.measure_outside_of_pools()
    tuner = CachingAutotuner()
    with torch_cuda.route_to_pool(0, (0, 1)), torch_cuda.route_to_pool(1, (0, 2)):
        assert tuner.bench("first", with_profiler=True) == 3.0
        assert routed == [(0, (0, 1)), (1, (0, 2))]
        with pytest.raises(KeyError):
            tuner.bench("fails")
        assert routed == [(0, (0, 1)), (1, (0, 2))]
        streams[1] = 9  # on another stream than that whose memory comes from the pool
        tuner.bench("beside")
    assert routed == []
    tuner.bench("after")
    assert calls == [("first", True, []), ("fails", False, []), ("beside", False, [(1, (0, 2))]), ("after", False, [])]


def test_what_measures_inductors_kernels_is_where_it_is_looked_for():
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    assert callable(CachingAutotuner.bench)


@pytest.mark.parametrize("gives_back", [False, True], ids=["as it should", "a reference too many"])
def test_the_numbers_of_a_pool_outlive_being_asked_for_its_segments(monkeypatch, gives_back):
    """torch 2.11 gives back references that it never took."""
    given = []

    def snapshot(pool):
        given.append(pool)
        if gives_back:
            for i in range(2):
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(pool[i]))
        return [{"segment_pool_id": (0, 300)}, {"segment_pool_id": (0, 0)}]

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    assert torch_cuda.segments((0, 300)) == [{"segment_pool_id": (0, 300)}]
    mine = torch_cuda._Number(0), torch_cuda._Number(300)
    assert [*map(sys.getrefcount, given[0])] == [*map(sys.getrefcount, mine)]


def test_a_hook_of_ours_is_not_the_users():
    """From torch 2.14 on `checkpoint` warns of those where it recomputes selectively; one of its own it asks for the user's."""
    kept = partial(checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    over = partial(torch.clone)
    over._user_hooks = None
    for hook in (
        torch_autograd.unseen_by_checkpoint(torch.Tensor.detach),
        torch_autograd.unseen_by_checkpoint(torch.clone, over),
    ):
        assert (hook._checkpoint_internal, hook._user_hooks) == (True, None)
        x = torch.ones(2, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(hook, lambda t: t), warnings.catch_warnings():
            warnings.simplefilter("error")
            y = checkpoint.checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False, context_fn=kept)
        y.sum().backward()
        torch.testing.assert_close(x.grad, -x.sin().sin().detach() * x.cos().detach())
    over._user_hooks = users = (torch.clone, torch.clone)
    assert torch_autograd.unseen_by_checkpoint(torch.Tensor.detach, over)._user_hooks is users


def test_functions_that_are_written_for_compiled_code_are_told_from_others():
    from torch._inductor.runtime import triton_heuristics

    met = {}

    def hear(frame, event, _):
        if event == "call" and frame.f_code.co_filename == "<string>":
            met[frame.f_code.co_name] = dict(frame.f_globals)

    compiled = torch.compile(lambda x, y: x * 2 if x.shape[0] > y.shape[0] + 3 else x, backend="eager", dynamic=True)
    with torch._dynamo.config.patch(enable_cpp_symbolic_shape_guards=False):
        sys.setprofile(hear)
        try:
            for rows in (9, 10, 4):
                compiled(torch.ones(rows), torch.ones(3))
        finally:
            sys.setprofile(None)
    assert torch_dynamo.is_written_by_torch("___make_guard_fn", met["___make_guard_fn"], triton_heuristics.__file__)
    assert torch_dynamo.is_written_by_torch("guard", met["guard"], __file__)
    users, launcher = {"G": 6.674e-11}, {"runner": print}
    exec("def force(m): return G * m", users)
    exec("def launcher(x): runner(x)", launcher)
    assert torch_dynamo.is_written_by_torch("launcher", launcher, triton_heuristics.__file__)
    assert not torch_dynamo.is_written_by_torch("launcher", launcher, __file__)
    assert not torch_dynamo.is_written_by_torch("guard", users, __file__)
    assert not torch_dynamo.is_written_by_torch("<lambda>", {"G": globals(), "__builtins__": {}}, __file__)
    assert not torch_dynamo.is_written_by_torch("guard", globals(), triton_heuristics.__file__)


def test_a_thread_of_autograds_stays_unknown_to_python():
    """A thread that is none of Python's making runs a backward: it counts as autograd's, and as none of Python's afterwards."""
    seen, over = [], threading.Event()

    def backward():
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda _: seen.append(torch_autograd.on_thread_of_autograds()))
        (x * 2).sum().backward()
        over.set()

    before = threading.active_count()
    backward()
    over.clear()
    _thread.start_new_thread(backward, ())
    assert over.wait(30)
    assert seen == [False, True]
    assert threading.active_count() == before


@pytest.mark.parametrize(("known", "is_autograds"), [("a thread", False), ("one that was met", True), ("nothing", True)])
def test_what_python_knows_of_the_thread_that_runs_a_backward(monkeypatch, known, is_autograds):
    """One that C has made, and Python has met (`threading.current_thread`), has a stand-in there."""
    threads = {"a thread": [threading.Thread()], "one that was met": [object.__new__(threading._DummyThread)], "nothing": []}
    seen, x = [], torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(torch_autograd.on_thread_of_autograds()))
    y = (x * 2).sum()
    assert not torch_autograd.on_thread_of_autograds()
    with monkeypatch.context() as patch:
        patch.setattr(torch_autograd, "_known_threads", {threading.get_ident(): t for t in threads[known]})
        y.backward()
    assert seen == [is_autograds]
