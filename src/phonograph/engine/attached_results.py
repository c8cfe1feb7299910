"""The backward of a captured call's results that are attached to the graph of autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .._torch.autograd import share_version
from .._torch.dynamic import Leaves
from .._torch.tensors import storage_id
from ..autograd.backward import Backward
from ..autograd.saved_hooks import Tracing
from ..capture.recording import Output
from ..devices.base import Captured
from ..errors import Refusal
from ..guards.unwatchable import NETWORK, in_trainer
from ..memory.pool import Lease
from ..memory.spans import Spans
from ..slots.gradients import Grads
from ..values.tensor_subclasses import storages
from . import outputs
from .capture_terms import Request
from .evidence import Evidence
from .output_kinds import Copied, Fresh

__all__ = ["backward_of", "settled"]

_KEEPS = ("keeps a tensor for backward where it cannot be followed (an attribute of ctx, a variable of a hook)",
          "use ctx.save_for_backward, or record the whole step")  # fmt: skip


def backward_of(
    request: Request, grads: Grads, evidence: Evidence, leases: dict[int, Lease], leaves: Leaves, plan: Sequence[Output],
) -> Backward | None:  # fmt: skip
    """The backward of those results that the plan attaches, if any are. Memory that code keeps by itself is added to `leases`:
    each replay writes it."""
    tracing, device, captured = request.tracing, request.device, evidence.captured
    attached = [i for i, output in enumerate(plan) if output.attached]
    if tracing is None or not attached:
        return None
    results = {i: leaf for i, (leaf, output) in enumerate(zip(leaves, plan, strict=True)) if isinstance(output, Fresh)}
    _check_results(results, attached, tracing, grads, captured)
    for key, t in tracing.held.items():
        storage = t.untyped_storage()
        where = storage.data_ptr(), storage.nbytes()
        leases[key] = Lease(*where, device.torch_device, (device.anchor(Spans([where])), storage))
    _check_inputs(request, tracing, captured)
    backward = tracing.backward(
        request.function,
        results,
        attached,
        captured.made,
        lambda key: outputs.lease(key, captured, leases, device),
        evidence.behaviour.code.sets_hooks,
    )
    backward.origins = captured.watch.origins
    saved = {x.address for x in backward.saved.memory}
    backward.copies = {i: o.place() for i, o in enumerate(plan) if isinstance(o, Copied) and o.lease.address in saved}
    if backward.only_captured and backward.recompute.parts and captured.watch.drops_out:
        raise Refusal("recomputes parts in its backward, and has dropout of cuDNN's, which begins anew there",
                      "put nn.Dropout between layers of their own, instead of dropout=")  # fmt: skip
    if backward.function is not None and request.reach.mentions.reads_gradients:
        raise Refusal("has code that runs in its backward, and may look at gradients, of which eager has added some by then",
                      NETWORK if in_trainer(request.reach.modules) else "record the whole step")  # fmt: skip
    return backward


def _check_results(
    results: Mapping[int, torch.Tensor], attached: Sequence[int], tracing: Tracing, grads: Grads, captured: Captured
) -> None:
    """Results with memory of their own, which nothing else keeps."""
    pairs = [(results[i], results[j]) for i in attached for j in results if i != j]
    if any(outputs.overlap(a, b) and (b.requires_grad or share_version(a, b)) for a, b in pairs):
        raise Refusal("returns tensors that overlap, and one has a history", "return a clone of it")
    followed = {key for g in grads.read() if g is not None for key in storages(g)} | tracing.held.keys()
    if any((s := ref()) is not None and s.nbytes() and s._cdata not in followed for ref in captured.others):
        raise Refusal(*_KEEPS, final=False)
    if any(storage_id(t) in tracing.held for t in results.values()):
        raise Refusal("keeps a result for its backward by itself (an attribute of ctx)", "use ctx.save_for_backward")


def _check_inputs(request: Request, tracing: Tracing, captured: Captured) -> None:
    """Tensors at which a backward ends: arguments and tensors outside."""
    pairs = zip(request.call.tensors, captured.used, strict=True)
    if any(t.requires_grad and storage_id(slot) in captured.watch.written for t, slot in pairs):
        raise Refusal("writes an argument that requires a gradient", "write a clone of it")
    touched = captured.watch.touched
    outside = [t for key, tensors in tracing.outside.items() if key in touched for t in tensors]
    if any(t.grad_fn is not None for t in outside):
        raise Refusal("reads a tensor outside that has a history of its own", "pass it as an argument")


def settled(tracing: Tracing | None) -> None:
    """To be called when a recording has been made and all else of its capture is gone.

    Raises:
        Refusal: something of it is still there, and the recording must not be used.
    """
    if tracing is not None and tracing.lost():
        raise Refusal(*_KEEPS, final=False)
