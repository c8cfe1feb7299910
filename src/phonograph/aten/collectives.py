"""What torch's operators that communicate with other ranks do. Their own schemas do not say: `c10d::allreduce_` declares no
argument that it writes.

None of them waits. Those of `c10d` give a `Work`, whose `wait` lets the current stream wait (on the CPU: the host); those of
`_c10d_functional` give tensors that are not there before `wait_tensor` has them. A capture communicates with nobody: on the CPU
each is a step of its own, as is the wait for it, which a capture leaves out (`devices/cpu/collectives.py`). In a CUDA graph a
collective is a kernel like others, and a wait is an edge; what needs the host (a barrier) is not captured there.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import Refusal

__all__ = ["COLLECTIVES", "LEAVE_VERSIONS", "REMEDY", "Collective", "called", "communicates", "refusal"]

REMEDY = "mark the function that does so @pg.live, or record what lies between"


class Collective(NamedTuple):
    """`name` is what users call it by, `writes` are the positions of arguments that it writes besides those which it declares.
    `host`: for what it needs the host, so that no CUDA graph can have it; `on_tapes`: the CPU device can."""

    name: str
    writes: tuple[int, ...] = ()
    host: str = ""
    on_tapes: bool = True


_HOST = ", for which the host waits"

COLLECTIVES = {
    "c10d::allreduce_": Collective("all_reduce", (0,)),
    "c10d::broadcast_": Collective("broadcast", (0,)),
    "c10d::reduce_": Collective("reduce", (0,)),
    "c10d::allgather_": Collective("all_gather", (0,)),
    "c10d::_allgather_base_": Collective("all_gather_into_tensor", (0,)),
    "c10d::reduce_scatter_": Collective("reduce_scatter", (0,)),
    "c10d::_reduce_scatter_base_": Collective("reduce_scatter_tensor", (0,)),
    "c10d::alltoall_": Collective("all_to_all", (0,)),
    "c10d::alltoall_base_": Collective("all_to_all_single", (0,)),
    "c10d::gather_": Collective("gather", (0,)),
    "c10d::gather_into_tensor_": Collective("gather", (0,)),
    "c10d::scatter_": Collective("scatter", (0,)),
    "c10d::send": Collective("send"),
    "c10d::recv_": Collective("recv", (0,)),
    "c10d::recv_any_source_": Collective("recv", (0,), ", which tells the host from whom", on_tapes=False),
    "c10d::allreduce_coalesced_": Collective("all_reduce_coalesced", (0,)),
    "c10d::allgather_coalesced_": Collective("all_gather_coalesced", (0,)),
    "c10d::allgather_into_tensor_coalesced_": Collective("all_gather_into_tensor, coalesced", (0,)),
    "c10d::reduce_scatter_tensor_coalesced_": Collective("reduce_scatter_tensor, coalesced", (0,)),
    "c10d::barrier": Collective("barrier", host=_HOST),
    "c10d::monitored_barrier_": Collective("monitored_barrier", host=_HOST),
    "_c10d_functional::all_reduce": Collective("all_reduce"),
    "_c10d_functional::all_reduce_": Collective("all_reduce"),
    "_c10d_functional::all_reduce_coalesced": Collective("all_reduce_coalesced"),
    "_c10d_functional::all_reduce_coalesced_": Collective("all_reduce_coalesced"),
    "_c10d_functional::all_gather_into_tensor": Collective("all_gather_into_tensor"),
    "_c10d_functional::all_gather_into_tensor_out": Collective("all_gather_into_tensor"),
    "_c10d_functional::all_gather_into_tensor_coalesced": Collective("all_gather_into_tensor_coalesced"),
    "_c10d_functional::reduce_scatter_tensor": Collective("reduce_scatter_tensor"),
    "_c10d_functional::reduce_scatter_tensor_out": Collective("reduce_scatter_tensor"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": Collective("reduce_scatter_tensor_coalesced"),
    "_c10d_functional::all_to_all_single": Collective("all_to_all_single"),
    "_c10d_functional::broadcast": Collective("broadcast"),
    "_c10d_functional::broadcast_": Collective("broadcast"),
    "_dtensor::shard_dim_alltoall": Collective("all_to_all_single", on_tapes=False),
    "_c10d_functional::wait_tensor": Collective("wait_tensor"),
    "_c10d_functional::_wrap_tensor_autograd": Collective("wait_tensor"),
}
"""By the names of their schemas. (From whom something was received, is told on the host.) What torch has besides, or will have,
is not captured."""

LEAVE_VERSIONS = frozenset(
    {*(f"c10d::{name}_" for name in ("allreduce", "reduce", "broadcast", "alltoall_base", "scatter", "recv")),
     *(f"_c10d_functional::{name}_" for name in ("all_reduce", "all_reduce_coalesced", "broadcast"))}
)  # fmt: skip
"""Those that move no version on in eager. (Others do by accident: gloo copies to where they are to write.)"""

_SPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem"})


def communicates(name: str) -> bool:
    """Whether the operator with this schema does."""
    return name.split("::")[0] in _SPACES or name == "_dtensor::shard_dim_alltoall"


def called(name: str) -> str:
    """What users call the operator with this schema."""
    return COLLECTIVES[name].name if name in COLLECTIVES else name


def refusal(name: str, why: str = "", remedy: str = REMEDY) -> Refusal:
    """Why a call with this operator is not captured."""
    return Refusal(f"communicates with other ranks ({called(name)}){why}", remedy)
