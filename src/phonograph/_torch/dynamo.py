"""Private parts of torch: `torch.compile`, its frames and what it compiles."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import wraps
from importlib.util import find_spec
from types import CodeType, FrameType

import torch
import torch.backends.mha
import torch.overrides
import torch.utils._device
import torch.utils._python_dispatch

from .dynamic import Private
from .functions import P, R
from .modes import _modes
from .modules import goes_through

__all__ = [
    "COMPILED_GRAPH",
    "compiled_by",
    "compiled_call",
    "compiling",
    "compiling_apart",
    "compiling_backend",
    "depends_on_data",
    "donates",
    "ended_by",
    "fake_mode_of",
    "hear_of_traced",
    "is_written_by_torch",
    "kept_of_generators",
    "looked_at_first",
    "names_graph",
    "never_compiled",
    "not_compiled_by_itself",
    "not_followed_by_dynamo",
    "number_of_call",
    "puts_own_generators",
    "ran_compiled",
    "run_where_traced",
    "telling_of_compiled",
    "tells_of_compilation",
    "traced_stack",
    "unbacked",
    "uncompiled",
    "wants_graphs",
    "written_by_graph",
]


not_followed_by_dynamo: Callable[[Callable[..., object]], Private] = getattr(torch, "_disable_dynamo", torch.compiler.disable)
"""What `torch.compiler.disable` is, and imports Dynamo only when what it is given is called."""


def not_compiled_by_itself(code: CodeType, *, nor_what_it_calls: bool = False) -> bool:
    """Let Dynamo run this code as it is where it is not part of what is compiled. Whether this release of torch can."""
    frames: Private = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if not (hasattr(frames, "set_code_exec_strategy") and hasattr(frames, "_FrameExecStrategy")):
        return False
    inner = frames._FrameAction.SKIP if nor_what_it_calls else frames._FrameAction.DEFAULT
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(frames._FrameAction.SKIP, inner))
    return True


def never_compiled(function: Callable[..., object], why: str) -> Callable[..., object]:
    """The same for a function that is called without Dynamo as well: it does not import it at all. A graph of Dynamo's ends
    where this is called."""
    apart = not_followed_by_dynamo(function)

    @wraps(function)
    def run(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs) if "torch._dynamo" not in sys.modules else apart(*args, **kwargs)

    run._torchdynamo_disable, run._torchdynamo_disable_msg = True, why  # type: ignore[attr-defined]
    return run


compiling: Callable[[], object] = getattr(getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None),
                                       "get_eval_frame_callback", lambda: None)  # fmt: skip
"""What compiles each function that this thread calls now, as between two graphs of `torch.compile`'s; None if nothing does."""


def run_where_traced(method: Callable[..., None]) -> Callable[..., None]:
    """Have Dynamo run this method at once where it traces a call of it, which leaves nothing in what is compiled."""
    method._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return method


def ended_by(function: Callable[P, R]) -> Callable[P, R]:
    """End a graph of Dynamo's where this is called, so that it really runs."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it is phonograph's, and asks what has really run"  # type: ignore[attr-defined]
    return function


def compiling_backend() -> object:
    """The backend for which Dynamo traces at the moment, or compiles what this thread calls."""
    tracer = getattr(sys.modules.get("torch._dynamo.symbolic_convert"), "InstructionTranslator", None)
    try:
        found = tracer.current_tx().output.compiler_fn if tracer is not None else None
    except AttributeError:  # it does not trace
        found = compiling()
    for wrapper in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "compiler_fn"):
        while hasattr(found, wrapper):
            found = getattr(found, wrapper)
    return found


def traced_stack() -> list[tuple[str, int]]:
    """The files and lines that Dynamo traces at the moment, the innermost last."""
    context = getattr(torch._guards, "TracingContext", None)
    return [(frame.filename, frame.lineno) for frame in context.extract_stack()] if context is not None else []


def uncompiled(f: object) -> object:
    """The module or function that `torch.compile` was called on, if this is what that gave; otherwise None."""
    if isinstance(f, torch.nn.Module):
        return f._modules.get("_orig_mod") if type(f).__name__ == "OptimizedModule" else None
    found: Private = getattr(f, "__dict__", {}).get("_torchdynamo_orig_callable")
    around = getattr(getattr(found, "__code__", None), "co_filename", "").endswith("external_utils.py")  # `wrap_inline`
    return found.__wrapped__ if around else found


_TRACES_MODULES = "torch._dynamo.variables.nn_module"


def hear_of_traced(notice: Callable[[Private], None]) -> None:
    """Have this told of what stands for the calls of a module, each time Dynamo traces one: it passes by that, and looks into
    the module's own forward at once. If Dynamo is not loaded yet, from then on."""
    if _TRACES_MODULES in sys.modules:
        _hear_of_traced(sys.modules[_TRACES_MODULES], notice)
    else:
        sys.meta_path.insert(0, _Loading(notice))


def _hear_of_traced(module: object, notice: Callable[[object], None]) -> None:
    kind: object = getattr(module, "UnspecializedNNModuleVariable", None)
    if not hasattr(kind, "call_function"):
        return
    call = kind.call_function

    @wraps(call)
    def call_function(self: object, *args: object, **kwargs: object) -> object:
        notice(getattr(getattr(self, "value", None), "_compiled_call_impl", None))
        return call(self, *args, **kwargs)

    kind.call_function = call_function


class _Loading:
    """Among what finds modules to be imported: waits for the one of Dynamo's that traces calls of modules."""

    def __init__(self, notice: Callable[[Private], None]) -> None:
        self._notice = notice

    def find_spec(self, name: str, path: Private = None, target: Private = None) -> Private:
        if name != _TRACES_MODULES:
            return None
        sys.meta_path.remove(self)
        spec: Private = find_spec(name)
        run = getattr(spec and spec.loader, "exec_module", None)
        if run is not None:

            def exec_module(module: object) -> None:
                run(module)
                _hear_of_traced(module, self._notice)

            spec.loader.exec_module = exec_module
        return spec


def telling_of_compiled(again: Callable[[torch.nn.Module, object], None], compile_: Callable[..., None]) -> Callable[..., None]:
    """A module's `compile` that calls this afterwards, with the module and what stood for its calls before."""

    @wraps(compile_)
    def compile(self: torch.nn.Module, *args: object, **kwargs: object) -> None:
        before = goes_through(self)
        compile_(self, *args, **kwargs)
        again(self, before)

    return compile


def ran_compiled(ran: Iterable[CodeType]) -> bool:
    """Whether something that `torch.compile` has made was called: of what is compiled in it, no function need have been."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    contexts = getattr(dynamo, "_TorchDynamoContext", None)
    return contexts is None or not _within(contexts.__call__.__code__).isdisjoint(map(_identity, ran))


def names_graph(name: object) -> bool:
    """Whether Dynamo gives such a name to what a backend has made of a graph, among the global variables of the code."""
    return type(name) is str and name.startswith("__compiled_fn_")


@contextmanager
def tells_of_compilation(begins: Callable[[], object], ends: Callable[[], object] = int) -> Iterator[None]:
    """Call these where Dynamo begins to compile something, and when it has, while the block runs."""
    handler: Private = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if handler is None or not hasattr(handler, "register_start_callback"):
        yield
        return
    begun = handler.register_start_callback(lambda _: begins())
    ended = handler.register_end_callback(lambda _: ends())
    try:
        yield
    finally:
        with suppress(ValueError):  # `torch._dynamo.reset` forgets all
            handler.remove_start_callback(begun)
            handler.remove_end_callback(ended)


_identity: Callable[[object], int] = object.__hash__  # (a code's own goes through all its instructions)


def _within(code: CodeType) -> set[int]:
    """The identities of this code and of all that is in it."""
    return {_identity(code)}.union(*(_within(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


_LAUNCHERS = ("/torch/_inductor/runtime/", "/triton/runtime/")  # the folders of code that calls functions which launch kernels


def is_written_by_torch(name: str, space: Mapping[str, object], caller: str) -> bool:
    """Whether a function of this name and with these globals, which has no file of its own, was written for compiled code: by
    Dynamo for some of its guards (it makes one where it compiles, and calls it to know whether what it has compiled will do),
    or by Inductor or Triton to launch a kernel (code of theirs calls it, in the file `caller`)."""
    if name in ("___make_guard_fn", "guard") and space.keys() == {"G", "__builtins__"}:
        return type(space["G"]) is dict and "__builtins__" in space["G"]
    return "__name__" not in space and any(folder in caller.replace(os.sep, "/") for folder in _LAUNCHERS)


def donates(node: object) -> bool:
    """Whether a node of autograd's is a compiled function whose backward may write what its forward has saved."""
    metadata = getattr(getattr(type(node), "_forward_cls", None), "metadata", None)
    if metadata is not None and getattr(metadata, "bw_donated_idxs", ()) is None:
        metadata.bw_donated_idxs = []  # compiled with donated_buffer=False: a backward that retains the graph asks for this
    return bool(getattr(metadata, "bw_donated_idxs", None))


def looked_at_first() -> bool:
    """Whether this is the first call of a graph that AOT autograd has compiled, in which it looks at what custom operators do:
    the only dispatch mode is that one."""
    return [type(mode).__name__ for mode in _modes()] == ["_AnalyzeCustomOpInputOutputMode"]


COMPILED_GRAPH = os.path.join("torch", "_inductor", "output_code.py"), "__call__"
"""The file and the name of the functions through which Inductor's code for a graph is called."""


def written_by_graph(frame: FrameType) -> list[torch.Tensor] | None:
    """What Inductor's code for a graph, which is called in this frame, says that it writes of its inputs; None if it does not
    say."""
    places = getattr(frame.f_locals.get("self"), "mutated_input_idxs", None)
    inputs = frame.f_locals.get("inputs")
    if places is None or inputs is None:
        return None
    return [inputs[i] for i in places if isinstance(inputs[i], torch.Tensor)]


_COMPILED_CALL = os.path.join("torch", "_functorch", "_aot_autograd", "runtime_wrappers.py")

_KEEPS = ("fwd_rng_states", "bwd_rng_states", "curr_fwd_iter", "backward_state_position", "pending_forwards",
          "saved_backward_tensor_states")  # fmt: skip


def compiled_call(frame: FrameType | None) -> object:
    """The node of autograd's whose forward or backward, which AOTAutograd has compiled, runs in this frame or calls it; None if
    there is none."""
    while frame is not None:
        if frame.f_code.co_name in ("forward", "backward") and frame.f_code.co_filename.endswith(_COMPILED_CALL):
            return frame.f_locals.get("ctx")
        frame = frame.f_back
    return None


def puts_own_generators(frame: FrameType) -> bool:
    """Whether this frame is of AOTAutograd's, and puts generators to where a forward has begun, before its backward."""
    code = frame.f_code
    return code.co_name in ("backward", "add_backward_args") and code.co_filename.endswith(_COMPILED_CALL)


def number_of_call(node: object) -> int | None:
    """The number of a call of what AOTAutograd has compiled, among those of its own generators; None if it has none."""
    return getattr(node, "_curr_iter", None)


class _Cells:
    """Some variables of functions, as attributes."""

    def __init__(self, names: Sequence[str], *functions: Private) -> None:
        found = {n: c for f in functions for n, c in zip(f.__code__.co_freevars, f.__closure__ or (), strict=False)}
        self.__dict__["cells"] = {n: found[n] for n in names if n in found}

    def __getattr__(self, name: str) -> object:
        try:
            return self.__dict__["cells"][name].cell_contents
        except (KeyError, ValueError):
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: object) -> None:
        self.__dict__["cells"][name].cell_contents = value


def kept_of_generators(node: object) -> object:
    """What AOTAutograd keeps of the generators of a function that it has compiled, of which this is a node: `fwd_rng_states`,
    for the forwards that `curr_fwd_iter` numbers; `bwd_rng_states`, which stand where the one of number
    `backward_state_position` has begun; which forwards are `pending_forwards`; and for the others of them,
    `saved_backward_tensor_states`. None if it has none, or keeps others."""
    function = getattr(type(node), "_forward_cls", None)
    if function is None or not hasattr(function, "compiled_fw"):
        return None
    functions = function.forward, function.backward  # of which they are variables (torch 2.11), or of one object (2.13)
    found = getattr(_Cells(["rng_state"], *functions), "rng_state", None) or _Cells(_KEEPS, *functions)
    return found if all(hasattr(found, name) for name in _KEEPS) else None


_NAMES = "kernel_name_max_ops"


def compiled_by(backend: str, gm: torch.fx.GraphModule, inputs: Private, options: Private) -> Callable[..., object]:
    """A graph of Dynamo's, compiled by a backend of that name, so that its backward can be run again: one that writes into what
    its forward has saved could not. Inductor makes no CUDA graphs of its own.

    Inductor keeps compiled graphs in a cache, whose keys do not say whether a backward may write what was saved (torch 2.11,
    2.13: `FxGraphHashDetails`). So it is asked for kernels whose names may be a little longer, which the keys do say.
    """
    import torch._dynamo
    import torch._functorch.config as functorch

    patch = functorch.patch(donated_buffer=False) if hasattr(functorch, "donated_buffer") else nullcontext()
    given: dict[str, object] = {"options": options} if options else {}
    if backend == "inductor":
        import torch._inductor.config as inductor

        names = (options or {}).get(_NAMES, getattr(inductor, _NAMES, None))
        own = {_NAMES: names + 1} if names is not None else {"fx_graph_cache": False}
        given = {"config_patches": {**(options or {}), **own, "triton.cudagraphs": False}}
    with patch:
        compiled: Callable[..., object] = torch._dynamo.lookup_backend(backend)(gm, inputs, **given)
    return compiled


def wants_graphs(gm: torch.fx.GraphModule) -> tuple[bool, bool]:
    """Whether forward and backward of a graph of Dynamo's may be CUDA graphs, as `torch._dynamo.override_cudagraphs` says
    (torch 2.13). It is taken from the graph, of which Inductor would make its own."""
    said = gm.meta.pop("cudagraph_annotation", None)
    forward, backward = getattr(said, "fwd", None), getattr(said, "bwd", None)
    return forward is not False, backward is not False


def depends_on_data(value: object) -> bool:
    """Whether a fake value, or its shape, is known only when it is computed."""
    if isinstance(value, (tuple, list)):
        return any(map(depends_on_data, value))
    free = getattr(sys.modules.get("torch.fx.experimental.symbolic_shapes"), "free_unbacked_symbols", None)
    symbolic = isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
    return symbolic and free is not None and bool(free(value))


def fake_mode_of(value: object) -> Private:
    """The mode that a fake tensor, or one of several, belongs to; None for anything else."""
    if isinstance(value, (tuple, list)):
        return next((mode for mode in map(fake_mode_of, value) if mode is not None), None)
    return getattr(value, "fake_mode", None) if isinstance(value, torch.Tensor) else None


def compiling_apart(inputs: Sequence[Private]) -> AbstractContextManager[object]:
    """A context in which a part of a graph of Dynamo's is compiled by itself: what is noted about it is not about the whole."""
    mode = fake_mode_of(inputs)
    return torch._guards.tracing(torch._guards.TracingContext(mode)) if mode is not None else nullcontext()


def unbacked(mode: object) -> AbstractContextManager[None]:
    """A context in which new sizes that depend on data are nobody's: what is computed is looked at, and forgotten."""
    env = getattr(mode, "shape_env", None)
    return nullcontext() if env is None else env.ignore_fresh_unbacked_symbols()
