"""What makes a recording impossible, whatever the function does: refused before anything is captured."""

from __future__ import annotations

import re
import sys

from .._torch.modules import parametrizations_are_cached
from .._torch.process_groups import coalesces
from .._torch.tensors import has_memory, is_leaf, is_shape, says_history, says_version
from ..call.signature import Call
from ..errors import Refusal
from ..guards import fsdp_state as shards
from ..guards.reachable import Reach
from ..guards.unwatchable import NETWORK, in_trainer
from ..python.names_in_code import HISTORY
from ..values.tensor_subclasses import parts

__all__ = ["check"]

# Modules of torch's that prepare a step, and what can be recorded of them.
_PARALLEL = (("torch.distributed.fsdp", "FullyShardedDataParallel", "record parts whose weights are not sharded"),)

# What is not the same for an argument and for the copy of it that a recording works with, or that nobody compares.
_MEMORY = frozenset({"_version", "_base", "_is_view", "storage_offset", "untyped_storage", "is_shared"})


def check(reach: Reach, call: Call, traced: bool) -> None:
    """Refuse a call for what it can reach, and for where it is called. A `traced` one has its backward outside."""
    _parallel_modules(reach, traced)
    _collectives(reach)
    _questions(reach, call, traced)
    if parametrizations_are_cached():
        raise Refusal("is called within parametrize.cached(), which keeps tensors from call to call",
                      "call it outside of that context, or enter it inside", this_call=True)  # fmt: skip
    if reach.truncated:
        raise Refusal("can reach more than can be watched", "let it refer to less, or pass what it needs as arguments")
    _gradients(reach)


def _parallel_modules(reach: Reach, traced: bool) -> None:
    """Modules that spread a step over ranks."""
    for module, name, remedy in _PARALLEL:
        parallel = getattr(sys.modules.get(module), name, ())
        if any(isinstance(m, parallel) for m in reach.modules):
            raise Refusal(f"contains {name}, which prepares each step outside of what can be captured", remedy)
    if reach.sharded and traced:
        raise Refusal("contains FSDPModule, whose backward cannot be recorded by itself", "call pg.record on the whole step")
    for path, t in reach.gathered:
        if not shards.empty(t):
            raise Refusal(f"begins with a parameter that is gathered ({path})", "call reshard() on the module", this_call=True)
        if t.is_leaf and t.grad is not None:
            raise Refusal(f"begins with a gradient that is not reduced yet ({path})", "record all micro-batches as one step",
                          this_call=True)  # fmt: skip


def _collectives(reach: Reach) -> None:
    """Collectives that have begun outside."""
    if coalesces():
        raise Refusal("is called where collectives are collected, to begin together", "call it outside of that", this_call=True)
    if reach.works:
        raise Refusal(f"can reach a collective that is under way ({reach.works[0]})", "wait for it outside, and drop it",
                      final=False)  # fmt: skip


def _questions(reach: Reach, call: Call, traced: bool) -> None:
    """Code that asks a tensor for what a slot answers otherwise than the argument."""
    theirs = [t for t in call.tensors if not t.is_leaf or t.is_inference() or (traced and t.requires_grad)]
    if reach.mentions.asks_history and theirs:
        raise Refusal("asks where an argument comes from (is_leaf, grad_fn, is_inference)", "pass a detached tensor",
                      _read_at(reach, *sorted(HISTORY)))  # fmt: skip
    for asked in sorted(_MEMORY & reach.mentions.reads):
        if not reach.gives(asked):
            remedy = NETWORK if in_trainer(reach.modules) else "do that outside, and pass the answer"
            raise Refusal(f"asks what a tensor's memory is like ({asked})", remedy, _read_at(reach, asked))


def _gradients(reach: Reach) -> None:
    """Gradients that no recording can leave in their place, and tensors of which torch does not say enough."""
    for name, t in reach.all_tensors:
        if not is_leaf(t) and not says_history(t):
            raise Refusal(f"can reach {name}, a view made without gradients, whose base was written since",
                          "make it a clone, or write its base under torch.no_grad()", this_call=True)  # fmt: skip
        if not says_version(t):
            raise Refusal(f"can reach {name}, a tensor of inference mode with the memory of another (.data = …)",
                          "write into it (copy_), or put a new tensor in its place", this_call=True)  # fmt: skip
        if is_leaf(t) and t.grad is not None and not all(has_memory(g) or is_shape(g) for g in parts(t.grad)):
            raise Refusal(f"works with a gradient that is not dense (that of {name})", "use dense gradients (sparse=False)")
    if reach.looks_at_gradients and (name := reach.trained_elsewhere):
        raise Refusal(f"may look at the gradient of {name}, a tensor that consists of others",
                      "record what needs no gradients by itself")  # fmt: skip


def _read_at(reach: Reach, *names: str) -> str:
    """Where the user's code reads what has the first of these names that it reads."""
    words = (re.split(r"\W+", name.rstrip("'\"])"))[-1] for name in names)
    return next(filter(None, map(reach.mentions.read_at, words)), "")
