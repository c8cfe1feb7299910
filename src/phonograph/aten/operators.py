"""What each aten operator means for a recording: what it writes, and whether it may be captured at all.

The facts come from the operators' own schemas (which argument is written, which output is a view) and tags (which
need a value on the host, which have a shape that depends on data); the few that the schemas get wrong are listed
here, each with its reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._torch.dynamic import Args, Kwargs, Private
from .._torch.operators import OpOverload, calls_others
from ..errors import Refusal
from ..memory.pool import dense
from ..python.identity import identity
from ..python.origin import in_package
from ..values.wording import MARKED, source_of
from .collectives import COLLECTIVES, communicates

__all__ = ["CASTS", "MASKED", "NO_TENSORS", "OF_SHAPES", "UNFILLED", "Meaning", "bytes_written", "can_run_live", "check",
           "constant", "made_integers", "meaning", "operands", "reaches_beside", "read_on_host", "reads_value", "remedy",
           "tensors_in", "written_by"]  # fmt: skip

aten = torch.ops.aten


class Meaning(NamedTuple):
    """What is known of one operator overload before it runs.

    `writes` are the positions, `writes_named` the names, of arguments that it may write. `reads_host` and
    `shape_from_data` refuse a recording; `metadata_only` operators (`t_`, `squeeze_`) change what a tensor object shows,
    and no memory. For all others than the `refusable` there is nothing to `check`. `compiled` says that it is no Python code,
    `others` that somebody else than torch has made it. `constant` operators hand in a tensor that Python code just made from
    numbers (`torch.tensor(2.0)`); those that `converts` may make integers of any size of floating-point numbers; `copies` are
    those that bring a tensor to another device. One that `communicates` does so with
    other ranks. What it is given to write may be given another size where it `resizes`. One
    that is `plain` only reads tensors, and nothing else has to be known of it. What one `calls` are
    operators as well, which may go by modes; one that writes lists may write them `one_by_one`, by others. Of a `usual` one
    none of all this is so, but that it is `plain` and `compiled`: as of most that are called. Results `may_be_fixed`, the same
    each time that all it is given is, and are so where they are `made_of_numbers` alone.
    """

    name: str
    writes: tuple[int, ...]
    writes_named: frozenset[str]
    reads_host: bool
    shape_from_data: bool
    random: bool
    metadata_only: bool
    refusable: bool
    compiled: bool
    others: bool
    communicates: bool
    constant: bool
    converts: bool
    copies: bool
    resizes: bool
    plain: bool
    calls: bool
    one_by_one: bool
    usual: bool
    may_be_fixed: bool
    made_of_numbers: bool


# Batch norm writes its running statistics; these older overloads do not say so. (The first three consist of others, and are
# seen as they are in inference mode.) The last is FSDP2's, of whose memory its results are views.
_UNDECLARED_WRITES = {
    "aten::batch_norm": (3, 4),
    "aten::_batch_norm_impl_index": (3, 4),
    "aten::instance_norm": (3, 4),
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
    "fsdp::all_gather_copy_in": (1,),
}
# These do so only in training, which is the argument after the statistics.
_IN_TRAINING = {name for name, places in _UNDECLARED_WRITES.items() if not name.startswith("aten::batch_norm_") and 4 in places}
# `repeat_interleave` needs the host only to learn its output's size; `index` only for boolean masks.
_SHAPE_KNOWN_IF = {
    "aten::repeat_interleave": lambda args, kwargs: kwargs.get("output_size") is not None,
    "aten::index": lambda args, kwargs: not _has_mask(args[1]),
}
_MASKED_WRITES = {"aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put"}
MASKED = frozenset({"aten::index", *_MASKED_WRITES})
"""Operators that may be given masks as indices."""
UNFILLED = frozenset(f"aten::{name}" for name in (
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "empty_quantized"))  # fmt: skip
"""Operators whose results hold whatever lies there."""
OF_SHAPES = frozenset(f"aten::{name}" for name in (
    "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"))  # fmt: skip
"""Operators that look at what a tensor is, and not at its values."""
_READS_OF = {"aten::masked_select": 1, "aten::_pack_padded_sequence": 1}  # which argument, where it is not all of them
HOLDS_AS = {"aten::_pack_padded_sequence": (1, 1)}
"""Which result holds the same each time that an argument does, whatever else the operator is given: sizes of batches."""
# They read lengths or ranges on the host without saying so.
_READS_HOST = {"aten::_pack_padded_sequence", "aten::fbgemm_linear_quantize_weight", "aten::_cslt_sparse_mm_search"}
# An operator that answers with a plain value has read one, but for these, which answer from what is known without.
_METADATA = {f"aten::{name}" for name in (
    "dim", "dense_dim", "sparse_dim", "_dimI", "_dimV", "numel", "sym_numel", "element_size", "size", "sym_size",
    "stride", "sym_stride", "storage_offset", "sym_storage_offset", "is_coalesced", "is_complex", "is_floating_point",
    "is_signed", "is_conj", "is_neg", "is_inference", "is_contiguous", "sym_is_contiguous",
    "is_non_overlapping_and_dense", "is_strides_like_format", "is_pinned", "is_same_size", "is_set_to", "is_leaf",
    "is_distributed", "is_vulkan_available", "output_nr", "retains_grad", "get_device", "result_type", "can_cast",
    "qscheme", "q_scale", "q_zero_point", "q_per_channel_axis", "cudnn_is_acceptable", "_version", "_is_zerotensor",
    "_has_same_storage_numel", "_has_compatible_shallow_copy_type", "_debug_has_internal_overlap",
    "_nested_get_ragged_idx", "_nested_tensor_storage_offsets", "_fused_sdp_choice", "_use_cudnn_ctc_loss",
    "_use_miopen_ctc_loss",
)}  # fmt: skip
CASTS = frozenset(f"aten::{name}" for name in (
    "_trilinear", "linalg_polar", "linalg_pinv", "ldexp", "mvlgamma", "_scaled_mm", "_scaled_mm_v2"))  # fmt: skip
"""Operators that autocast does not cast, and that call some which it does."""
_CONVERTING = {"aten::_to_copy", "aten::copy_", "aten::copy", "aten::bucketize", "aten::searchsorted", "aten::view",
               "prims::convert_element_type"}  # fmt: skip
_BOOL = torch.bool
NO_TENSORS = frozenset({int, float, bool, type(None), str, torch.dtype, torch.device})
"""Classes of what most of an operator's other arguments are: to be asked for first, for whether something is a tensor takes
longer where it is none."""
_TORCHS = {"aten", "prims", "prim", "profiler", "inductor", "quantized", "c10d", "_c10d_functional", "c10d_functional",
           "_c10d_functional_autograd", "fsdp"}  # fmt: skip
_COPIES = {"aten::_to_copy", "aten::copy_"}
_CONSTANT = {"aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift"}
# They change what a tensor *is* rather than what it holds: a replay cannot repeat that for the caller.
_RESHAPES_STORAGE = {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_"}
# Their derivatives are another formula where nobody may look on the host whether there are zeros, as in a capture.
_OTHER_DERIVATIVES = {"aten::prod", "aten::cumprod"}
# Of some others, where somebody is told of each operator: tangents that are rounded otherwise, a gradient with other strides.
_OTHER_TANGENTS = {f"aten::{name}" for name in (
    "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm", "native_group_norm",
    "native_layer_norm", "_fused_rms_norm", "prod",
)}  # fmt: skip
_READS_NUMBER = "aten::_local_scalar_dense"
_OTHER_STRIDES = {"aten::ormqr"}
# Given lists, who calls it makes tensors of them afterwards, which no operator fills: a segment after it would not have them.
_BESIDE_LISTS = {"aten::_ctc_loss"}
_REFUSABLE = _MASKED_WRITES | _RESHAPES_STORAGE | _OTHER_DERIVATIVES | _OTHER_TANGENTS | _OTHER_STRIDES
_REMEDIES = {
    _READS_NUMBER: "keep the value on the device: torch.where, pg.cond or masked arithmetic instead of .item(), "
    "float(), bool() or `if`, x[i.view(1)] instead of x[i] where i has no dimensions; or return the tensor and read it "
    'outside; or fallback="split", if the value is most often the same',
    "aten::equal": "torch.equal answers on the host; use (a == b).all() and torch.where; "
    'or fallback="split", if the answer is most often the same',
    "aten::allclose": "torch.allclose answers on the host; use torch.isclose(a, b).all() and torch.where; "
    'or fallback="split", if the answer is most often the same',
    "aten::_pack_padded_sequence": "lengths are read on the host: work with padded tensors, and mask what is padded",
    "aten::nonzero": "the number of matches is not known beforehand; use torch.where(mask, a, b) or torch.nonzero_static",
    "aten::index": "a boolean mask selects an unknown number of elements; use torch.where or masked_fill",
    "aten::masked_select": "use torch.where or multiply by the mask",
    "aten::repeat_interleave": "pass output_size=",
    "aten::bincount": "use torch.zeros(n).scatter_add_",
    "aten::_unique2": f"sort instead, or do it outside the recorded function, {MARKED}",
    "aten::resize_": "make a new tensor of that size instead",
    "aten::set_": "copy into the tensor (copy_), or make a new one",
    "aten::_nested_tensor_from_mask_left_aligned": "make the encoder with enable_nested_tensor=False",
}
# By what stands in the expression.
_REMEDIES_THERE = {
    "one_hot(": "call it as F.one_hot(x, num_classes), or compare with all classes: "
    "(x.unsqueeze(-1) == torch.arange(n, device=x.device)).long()",
    "torch.tensor(": "torch.stack makes a tensor of tensors",
}
_AS_NUMBER = ".item()", "float(", "int("
_IN_PACKAGE = "it is code of a package: record the model alone, model = pg.record(model)"  # by its name, where that is known
_AS_TENSOR = (
    "return the tensor and read it outside, or use the tensor itself; or keep the value on the device: torch.where, pg.cond, "
    'masked arithmetic, x[i.view(1)] where i has no dimensions; or fallback="split", if the value is most often the same'
)


_known: dict[int, tuple[object, Meaning]] = {}  # by identity: an overload's own hash is Python code


def meaning(func: OpOverload) -> Meaning:
    """What `func` means; worked out once an overload."""
    known = _known.get(identity(func))
    if known is None:
        known = _known[identity(func)] = func, _meaning(func)
    return known[1]


def _meaning(func: OpOverload) -> Meaning:
    schema, tags = func._schema, func.tags
    arguments = schema.arguments  # made anew each time that they are asked for
    written = [(i, a) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    writes = tuple([i for i, a in written if not a.kwarg_only])
    named = frozenset([a.name for _, a in written])
    reads_host = torch.Tag.data_dependent_output in tags or schema.name in _READS_HOST or _answers_from_data(func)
    shape_from_data = torch.Tag.dynamic_output_shape in tags or _is_nonzero(schema)
    writes += _UNDECLARED_WRITES.get(schema.name, ())
    writes += COLLECTIVES[schema.name].writes if schema.name in COLLECTIVES else ()
    random = torch.Tag.nondeterministic_seeded in tags and "philox_seed" not in {a.name for a in arguments}
    compiled, others = schema.name.startswith("aten::"), schema.name.split("::")[0] not in _TORCHS
    far, constant, converts = communicates(schema.name), schema.name in _CONSTANT, schema.name in _CONVERTING
    changed = torch.Tag.inplace_view in tags
    refusable = reads_host or shape_from_data or schema.name in _REFUSABLE
    plain = not (writes or named or random or far or schema.name == "aten::as_strided")
    calls, casts = calls_others(func), schema.name in CASTS
    return Meaning(
        name=schema.name,
        writes=writes,
        writes_named=named,
        reads_host=reads_host,
        shape_from_data=shape_from_data,
        random=random,
        metadata_only=changed,
        refusable=refusable,
        compiled=compiled,
        others=others,
        communicates=far,
        constant=constant,
        converts=converts,
        copies=schema.name in _COPIES,
        resizes=bool(named) and (not compiled or any(_may_be_resized(a) for _, a in written)),
        plain=plain,
        calls=calls,
        one_by_one=bool(writes) and schema.name.startswith("aten::_foreach_"),
        may_be_fixed=not (random or others or far or schema.name in UNFILLED),
        made_of_numbers=constant or (schema.name in OF_SHAPES and plain),  # and not a part of something (out=)
        usual=plain and compiled and not (refusable or changed or constant or converts or others or calls or casts),
    )


def _may_be_resized(argument: Private) -> bool:
    """Whether a torch operator may give this argument, which it writes, another size: `out`, and minima and maxima so far, and
    no operand that it works on in place, or a list of those."""
    return argument.kwarg_only or not (argument.name == "self" or str(argument.type).startswith("List"))


def _is_nonzero(schema: Private) -> bool:
    """Whether it is `nonzero` by another name: `torch.where` with one argument does not say so."""
    return schema.name == "aten::nonzero_numpy" or (schema.name == "aten::where" and len(schema.arguments) == 1)


def _answers_from_data(func: OpOverload) -> bool:
    """Whether an operator of tensors returns plain values only, and these from what the tensors hold."""
    schema = func._schema
    lengths_in_tensors = schema.name.endswith("ctc_loss") and schema.overload_name == "Tensor"
    if not schema.returns or communicates(schema.name) or (schema.name in _METADATA and not lengths_in_tensors):
        return False
    plain = not any("Tensor" in str(r.type) for r in schema.returns)
    return plain and any("Tensor" in str(a.type) for a in schema.arguments)


def can_run_live(func: OpOverload | None) -> bool:
    """Whether an operator may run between segments: not if it gives a plain value, which no later segment can read, nor if it
    is differentiated otherwise where somebody is told of operators, as in the live call before and in the capture; nor one
    that is called by code which goes on with memory that no operator has filled."""
    if func is None or _answers_from_data(func) or _beside_lists(func):
        return False
    return meaning(func).name not in _OTHER_DERIVATIVES | _OTHER_TANGENTS | _OTHER_STRIDES


def _beside_lists(func: OpOverload) -> bool:
    """Whether who calls this overload fills memory by no operator."""
    schema = func._schema
    return schema.name in _BESIDE_LISTS and any(str(a.type) == "List[int]" for a in schema.arguments)


def operands(args: Sequence[object], kwargs: dict[str, object]) -> list[Tensor]:
    """The tensors among an operator's arguments, in order."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) in NO_TENSORS:
            continue
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            tensors_in(value, found)
    return found


def tensors_in(value: object, into: list[Tensor]) -> list[Tensor]:
    """Append to `into` the tensors among an operator's arguments or results, in order."""
    if isinstance(value, Tensor):
        into.append(value)
    elif isinstance(value, (list, tuple)):
        for v in value:
            if isinstance(v, Tensor):
                into.append(v)
            elif isinstance(v, (list, tuple)):
                tensors_in(v, into)
    return into


def written_by(m: Meaning, args: Sequence[object], kwargs: dict[str, object]) -> list[Tensor]:
    """The tensors that this call of the operator may write."""
    found: list[Tensor] = []
    if m.name in _IN_TRAINING and len(args) > 5 and args[5] is False:
        return found
    for i in m.writes:
        if i < len(args):
            tensors_in(args[i], found)
    for name in m.writes_named & kwargs.keys():
        tensors_in(kwargs[name], found)
    return found


def read_on_host(m: Meaning, args: Sequence[object], kwargs: dict[str, object]) -> list[Tensor]:
    """The tensors whose values this call of the operator reads on the host: to answer, or to know a size."""
    if m.name in MASKED:
        return [i for i in tensors_in(args[1], []) if _is_mask(i)]
    if not (m.reads_host or m.shape_from_data):
        return []
    at = _READS_OF.get(m.name, -1)
    return operands(args, kwargs) if at < 0 else tensors_in(args[at], [])


def answers_by_shapes(m: Meaning, args: Args) -> bool:
    """Whether what this call of the operator answers follows from what tensors are, whatever their values."""
    return m.name == "aten::equal" and args[0].shape != args[1].shape


def bytes_written(m: Meaning, args: Sequence[object], kwargs: dict[str, object]) -> list[int]:
    """The bytes of each storage that this call of the operator may write."""
    return [t.untyped_storage().nbytes() for t in written_by(m, args, kwargs)]


def reaches_beside(args: Args, kwargs: dict[str, object]) -> bool:
    """Whether `as_strided` with these arguments may show memory that the tensor itself does not."""
    return len(args) > 3 or "storage_offset" in kwargs or not dense(args[0])


def made_integers(args: Sequence[object], out: object) -> bool:
    """Whether an operator did: its result has integers, and an argument floating-point numbers."""
    integers = isinstance(out, Tensor) and not (out.dtype is _BOOL or out.is_floating_point() or out.is_complex())
    return integers and any(t.is_floating_point() or t.is_complex() for t in tensors_in(args, []))


def constant(m: Meaning, given: Tensor) -> Tensor:
    """What a `constant` operator gives: that tensor itself, which may lie in an array's memory; a copy where the operator makes
    one (what it copies is a constant of some graph's, and outlives the call)."""
    return given.clone() if m.name == "aten::lift_fresh_copy" else given


def check(m: Meaning, args: Args, kwargs: Kwargs, said: Callable[[str], str] = source_of) -> None:
    """Refuse what no device can capture. An operator is `said` to be what it is for the user.

    Raises:
        Refusal: naming the operator and the remedy; the caller adds the user's line.
    """
    if m.reads_host:
        raise reads_value(m.name, said)
    if m.shape_from_data:
        known = _SHAPE_KNOWN_IF.get(m.name)
        if known is None or not known(args, kwargs):
            advice = _REMEDIES.get(m.name, f"use what gives a fixed shape, or call it outside the recorded function, {MARKED}")
            raise _of_values(Refusal(f"{said(m.name)} has a shape that depends on data", advice))
    if m.name in _MASKED_WRITES and _has_mask(args[1]) and args[2].numel() != 1:
        raise Refusal(f"{said(m.name)} with a boolean mask counts its matches on the host",
                      "use torch.where(mask, new, old)")  # fmt: skip
    if m.name in _OTHER_DERIVATIVES and torch.is_grad_enabled() and args[0].requires_grad:
        raise Refusal(f"{said(m.name)} has a gradient for which torch looks on the host whether there are zeros",
                      "work with logarithms: x.log().cumsum(-1).exp()")  # fmt: skip
    if (m.name in _OTHER_TANGENTS and forward_ad._current_level >= 0) or (
        m.name in _OTHER_STRIDES and torch.is_grad_enabled() and any(t.requires_grad for t in operands(args, kwargs))
    ):
        raise Refusal(f"{said(m.name)} is differentiated by another formula while it is captured",
                      "call it outside the recorded function")  # fmt: skip
    if m.name in _RESHAPES_STORAGE:
        raise Refusal(f"{said(m.name)} replaces or resizes a tensor's memory",
                      _REMEDIES.get(m.name, "make a new tensor instead"))  # fmt: skip


def remedy(name: str) -> str:
    """What to do instead of calling this operator; "" if there is nothing of its own to say."""
    return _REMEDIES.get(name, "")


def reads_value(name: str = _READS_NUMBER, said: Callable[[str], str] = source_of) -> Refusal:
    reader = said(name)
    otherwise = remedy(name) or "return the tensor and read it outside the recorded function"
    if in_package(sys._getframe(1)):
        otherwise = _IN_PACKAGE
    elif name == _READS_NUMBER and any(part in reader for part in _AS_NUMBER):
        otherwise = _AS_TENSOR
    there = (advice for part, advice in _REMEDIES_THERE.items() if part in reader)
    return _of_values(Refusal(f"{reader} reads a tensor's value on the host", next(there, otherwise)))


def brings_to_host(name: str) -> Refusal:
    """The refusal of an operator of this name that copies a tensor of a GPU's to the host."""
    return _of_values(Refusal(f"{source_of(name)} copies a tensor from the GPU to the CPU",
                              "return the tensor, and copy it outside the recorded function"))  # fmt: skip


def _of_values(refusal: Refusal) -> Refusal:
    refusal.of_values = True
    return refusal


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(isinstance(i, Tensor) and _is_mask(i) for i in indices)


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)
