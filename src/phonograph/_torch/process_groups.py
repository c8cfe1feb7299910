"""Private parts of torch: process groups and their collectives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from functools import cache
from types import FrameType

import torch
import torch.backends.mha
import torch.overrides
import torch.utils._device
import torch.utils._python_dispatch

from .dynamic import Private

__all__ = [
    "GATHERED",
    "abort",
    "backend_of",
    "before_groups_end",
    "coalesces",
    "coalescing",
    "default_store",
    "group_among",
    "groups_of",
    "groups_tell_their_end",
    "has_begun",
    "is_under_way",
    "is_work",
    "keeps_shards",
    "once_there",
    "own_rank",
    "rank_in",
    "ranks_of",
    "several",
    "sharding_of",
    "stands_for_work",
    "stop_coalescing",
    "timeout_of",
    "unboxed_work",
    "wait_for_all",
    "waits_by_itself",
]


def _c10d(name: str) -> Private:
    """Where torch is built for several ranks, and they are in use."""
    return getattr(sys.modules.get("torch._C._distributed_c10d"), name, None)


def several() -> bool:
    """Whether this process is one of several ranks."""
    groups: Private = torch.distributed
    return bool(groups.is_available() and groups.is_initialized() and groups.get_world_size() > 1)


def groups_of_ranks() -> tuple[type, ...]:
    """The classes of what says which ranks communicate. Nobody changes such an object: another takes its place."""
    if not torch.distributed.is_available():
        return ()
    from torch.distributed.device_mesh import DeviceMesh

    return torch.distributed.ProcessGroup, DeviceMesh


def waits_by_itself(kinds: Iterable[type]) -> bool:
    """Whether one of these kinds of tensors is what functional collectives give: it waits where it is used."""
    module: object = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and any(kind is getattr(module, "AsyncCollectiveTensor", None) for kind in kinds)


def once_there(t: Private) -> torch.Tensor:
    """What a functional collective has given, once it is there; any other tensor itself."""
    return t.trigger_wait() if waits_by_itself([type(t)]) else t  # type: ignore[no-any-return]


def is_under_way(t: torch.Tensor) -> bool:
    """Whether it is what a collective gives that goes on."""
    return waits_by_itself([type(t)]) and not getattr(t, "completed", False)


def groups_of(t: object) -> list[object]:
    """The process groups by which a tensor that is spread over several ranks communicates: a mesh that is made anew with others
    equals the one before."""
    mesh = getattr(t, "device_mesh", None)
    with suppress(Exception):  # (no part of it is on this rank)
        return [*mesh.get_all_groups()] if mesh is not None else []
    return []


_SHARDING, _PIPELINING = "torch.distributed.fsdp._fully_shard.", "torch.distributed.pipelining."


def sharding_of(module: torch.nn.Module) -> object:
    """What `fully_shard` keeps for this module, if it has been called on it."""
    kind: Private = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return module._get_fsdp_state() if kind is not None and isinstance(module, kind) else None


def keeps_shards(kind: type) -> bool:
    """Whether objects of this kind are `fully_shard`'s own."""
    return kind.__module__.startswith(_SHARDING) and not issubclass(kind, (torch.nn.Module, Enum))


def keeps_stages(kind: type) -> bool:
    """Whether objects of this kind are a pipeline's: its stages, its schedule, what they keep."""
    return kind.__module__.startswith(_PIPELINING) and not issubclass(kind, (torch.nn.Module, Enum))


GATHERED = ("_unsharded_param", "all_gather_outputs", "_unsharded_inner_tensors")
"""The attributes of such an object whose tensors have memory only while a parameter is gathered: the first is what a module
then has for the parameter, and has a gradient."""


def is_work(kind: type) -> bool:
    """Whether objects of this kind stand for a collective that is under way."""
    return issubclass(kind, _c10d("Work") or ())


def wait_for_all(results: Iterable[Private]) -> None:
    """Wait for those that would do so by themselves, where they are used."""
    for x in results:
        if waits_by_itself([type(x)]):
            x.trigger_wait()


def coalesces() -> bool:
    """Whether somebody collects collectives at the moment, to begin them together at some later point."""
    return bool(coalescing())


def group_among(given: Iterable[object]) -> Private:
    """The process group which is among an operator's arguments: boxed, by its name, or as it is. None if there is none."""
    kind, find = _c10d("ProcessGroup"), _c10d("_resolve_process_group")
    for x in given:
        with suppress(Exception):  # other arguments are boxed as well (what to reduce by), or texts
            return find(x) if isinstance(x, str) else x if isinstance(x, kind) else kind.unbox(x)
    return None


def backend_of(group: Private, device: torch.device) -> Private:
    """What communicates for tensors of this device in a process group. None if there is none."""
    with suppress(Exception):
        return group._get_backend(torch.device(device.type))
    return None


def timeout_of(name: str, device: torch.device) -> float | None:
    """How many seconds the process group of this name gives a collective of such tensors now; None where that is not known."""
    with suppress(Exception):  # no such group any more
        return float(backend_of(_c10d("_resolve_process_group")(name), device).options._timeout.total_seconds())
    return None


def abort(name: str, device: torch.device) -> None:
    """Abort what communicates for such tensors in the process group of this name: whoever waits for it goes on."""
    with suppress(Exception):  # no such group any more
        backend_of(_c10d("_resolve_process_group")(name), device).abort()


def ranks_of(name: str) -> list[int]:
    """Who is in the process group of this name: ranks of the default group."""
    with suppress(Exception):
        return list(torch.distributed.get_process_group_ranks(_c10d("_resolve_process_group")(name)))
    return []


def default_store() -> Private:
    """The store of the default process group. Raises where there is none."""
    return torch.distributed.distributed_c10d._get_default_store()


def own_rank() -> int:
    """In the default process group; 0 where there is none."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def rank_in(group: Private) -> int:
    """That of this process in a process group, which is boxed."""
    return int(_c10d("ProcessGroup").unbox(group).rank())


def unboxed_work(x: object) -> object:
    """The collective that is under way for which this stands; None if it stands for none."""
    return _c10d("Work").unbox(x) if isinstance(x, torch.ScriptObject) else None


def stands_for_work(wait: Callable[..., None], refuse: Callable[[], None], tensors: object = None) -> Private:
    """What stands for a collective that is under way: it is waited for by this function, also where somebody asks for its
    future, which has these tensors; without them that is refused."""
    return _standing_work()(wait, refuse, tensors)


@cache
def _standing_work() -> type:
    class Work(_c10d("Work")):  # type: ignore[misc]
        def __init__(self, wait: Callable[..., None], refuse: Callable[[], None], tensors: object) -> None:
            super().__init__()
            self._wait, self._refuse, self._tensors = wait, refuse, tensors

        def wait(self, *timeout: object, **named: object) -> bool:
            self._wait(*timeout, *named.values())
            return True

        def get_future(self) -> object:
            if self._tensors is None:
                self._refuse()
            self._wait()
            done: torch.futures.Future[object] = torch.futures.Future()
            done.set_result(self._tensors)
            return done

        def synchronize(self) -> None:
            self._refuse()

        block_current_stream = synchronize

    return Work


def coalescing() -> list[object]:
    """The process groups whose collectives somebody collects at the moment, to begin them together."""
    world: object = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    return [*getattr(world, "pg_coalesce_state", ())]


def stop_coalescing(group: Private, device: torch.device | None) -> None:
    """Nobody collects collectives of this group any more, and those that were are forgotten. With a device: they have begun,
    there."""
    world: Private = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    world.pg_coalesce_state.pop(group, None)
    if device is not None:
        with suppress(RuntimeError):
            group._end_coalescing(device)


def batch_of(frame: FrameType | None) -> list[Private] | None:
    """What `batch_isend_irecv` sends and receives, where this frame is of it or of what it calls."""
    for _ in range(4):  # the context manager that it enters, and contextlib's own code
        if frame is None:
            return None
        if (
            frame.f_code.co_name == "batch_isend_irecv"
            and frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d"
        ):
            found: list[object] | None = frame.f_locals.get("p2p_op_list")
            return found
        frame = frame.f_back
    return None


def has_begun(backend: object) -> bool:
    """Whether it has communicated before, where it tells: it must not begin to in a capture."""
    begun = getattr(backend, "_is_initialized", None)
    return begun is None or bool(begun())


_ENDS = ("shutdown", "abort")


def _groups() -> list[type]:
    return [kind for name in ("ProcessGroup", "ProcessGroupNCCL") if (kind := _c10d(name)) is not None]


def groups_tell_their_end() -> bool:
    """Whether `before_groups_end` can hear of it."""
    group = _c10d("ProcessGroup")
    return group is not None and all(name in vars(group) for name in _ENDS)


def before_groups_end(call: Callable[[], None]) -> Callable[[], None]:
    """From now on, call this before any process group is shut down or aborted, whoever asks for it. (`destroy_process_group`
    comes by the groups' own methods, and may have been imported by name long ago.) Returns what ends that."""
    places = [(kind, name, own) for kind in _groups() for name in _ENDS if (own := vars(kind).get(name)) is not None]
    for kind, name, own in places:
        setattr(kind, name, _after(call, own))

    def undo() -> None:
        for kind, name, own in places:
            setattr(kind, name, own)

    return undo


def _after(call: Callable[[], None], own: Private) -> Callable[..., object]:
    def end(self: object, *args: object, **kwargs: object) -> object:
        call()
        return own.__get__(self, type(self))(*args, **kwargs)

    return end
