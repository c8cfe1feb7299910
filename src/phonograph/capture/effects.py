"""What Python code may do that a replay cannot repeat: effects on the outside world, and values that are new in each call.

This file only decides; `python_events.py` hears of the calls. A call of a built-in function or method is decided by the
function, or by the method's name and its owner (`of_call`); the start of a Python function by its file and name (`of_start`).
An `Effect` also says *who* must have caused it. torch and installed packages open files, log and read clocks for purposes of
their own (compiling a kernel, say), which concern nobody else; what the standard library does, it does for its caller:
`Path.write_text` is as much the user's effect as `open`.

Refused before it happens, so that the live run that follows is the only one that has the effect. What is refused without
need costs speed only; so a queue, file or event that the call itself makes is not told from one that outlives it.
"""

from __future__ import annotations

import _asyncio
import _csv
import _queue
import _socket
import _thread
import _warnings
import builtins
import contextvars
import datetime
import gc
import io
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from itertools import chain
from opcode import opmap
from types import BuiltinFunctionType, CodeType, FrameType
from typing import Any, NamedTuple

import torch

from ..aten.collectives import REMEDY
from ..errors import OnlyNow, Refusal
from ..python.identity import identity
from ..python.loggers import decides_itself
from ..python.origin import STDLIB, USER, is_ours, is_torchs, origin, works_for
from ..state.rng import sets_for_torch
from ..values.device_names import is_of, named
from ..values.wording import MARKED

__all__ = ["ANYONE", "EXPORT", "SCHEDULER", "Effect", "Starts", "mentions", "of_call", "of_start", "refusable", "start_names",
           "together", "told_names"]  # fmt: skip

ANYONE, OTHERS, USERS, DIRECTLY = "anyone", "others", "users", "directly"


class Effect(NamedTuple):
    """An effect, the remedy, and whose it must be: `ANYONE`'s; of `OTHERS` than torch; the `USERS` code's, or the standard
    library's when it works for the user; or the user's own frame's `DIRECTLY`. It is refused by a refusal of this `kind`."""

    reason: str
    remedy: str = f"do it outside the recorded function, {MARKED}"
    by: str = USERS
    kind: type[Refusal] = Refusal

    def counts(self, frame: FrameType | None) -> bool:
        """Whether it is an effect when the code of `frame` causes it."""
        if self.by is ANYONE or frame is None:
            return self.by is ANYONE
        if self.by is OTHERS:
            return not is_torchs(frame.f_code.co_filename)
        if self.by is DIRECTLY:
            return origin(frame.f_code.co_filename) is USER
        return works_for(frame) is USER


SCHEDULER = Effect(
    "changes a scheduler's last_epoch, which outlives the call",
    "call the scheduler's step() outside: a recorded optimizer follows the learning rate that it sets",
    ANYONE,
)
"""What a capture shows at its end."""

_PASS = "read it outside and pass the value as an argument"
_DRAW = "draw it outside and pass it as an argument, or use torch's generators"

# -- built-in functions


def _named(module: object, names: str, effect: Callable[[str], Effect]) -> dict[object, Effect]:
    return {getattr(module, n): effect(n) for n in names.split() if hasattr(module, n)}


_CLOCKS = " ".join(
    n for n, f in vars(time).items()
    if isinstance(f, BuiltinFunctionType) and n not in ("mktime", "strptime", "get_clock_info", "clock_getres", "tzset")
)  # fmt: skip
_FUNCTIONS: dict[Any, Effect] = {
    **_named(builtins, "print input breakpoint", lambda n: Effect(f"calls {n}()")),
    **_named(builtins, "open", lambda n: Effect("calls open()")),
    **_named(_warnings, "warn warn_explicit", lambda n: Effect(f"calls warnings.{n}()", by=DIRECTLY)),
    **_named(torch, "frombuffer", lambda n: Effect(f"calls torch.{n}, whose tensor shares memory with a host "
             "object", "pass the tensor as an argument", by=DIRECTLY)),
    **_named(torch.utils.dlpack, "to_dlpack", lambda n: Effect(f"hands the memory of a tensor to code outside torch ({n})",
             by=OTHERS)),
    **_named(time, _CLOCKS, lambda n: Effect(f"reads the clock ({n})", _PASS, by=DIRECTLY)),
    **_named(os, "urandom getrandom", lambda n: Effect(f"reads entropy of the system (os.{n})", _DRAW)),
    **_named(os, "open write writev pwrite pwritev read readv pread preadv sendfile copy_file_range truncate ftruncate mkdir "
             "mkfifo mknod remove unlink rmdir rename replace link symlink chmod fchmod lchmod chown fchown lchown utime "
             "setxattr removexattr chdir fchdir chroot putenv unsetenv system fork forkpty posix_spawn posix_spawnp execv "
             "execve kill killpg _exit umask nice", lambda n: Effect(f"calls os.{n}")),
    **_named(os, "times getloadavg", lambda n: Effect(f"reads the clock (os.{n})", _PASS, by=DIRECTLY)),
    **_named(os, "getpid getppid", lambda n: Effect(f"asks which process runs it (os.{n})", _PASS, by=DIRECTLY)),
    **_named(_thread, "get_ident get_native_id", lambda n: Effect(f"asks which thread runs it ({n})", _PASS, by=DIRECTLY)),
    **_named(_asyncio, "current_task all_tasks", lambda n: Effect(f"asks which task runs it ({n})", _PASS, by=DIRECTLY)),
    **_named(gc, "disable enable freeze unfreeze", lambda n: Effect(f"calls gc.{n}()", by=DIRECTLY)),
    **_named(gc, "isenabled get_count get_stats", lambda n: Effect(f"asks how garbage is collected (gc.{n})", _PASS, DIRECTLY)),
    **_named(os, "listdir scandir", lambda n: Effect(f"reads a directory (os.{n})", _PASS)),
    **_named(os, "stat lstat access readlink", lambda n: Effect(f"asks for a file (os.{n})", _PASS)),
    **_named(_socket, "getaddrinfo gethostbyname", lambda n: Effect(f"uses the network ({n})")),
}  # fmt: skip

_RANK: Any = torch.linalg.matrix_rank  # where a dispatch mode looks on, what is to be written is another tensor from there on
_LOSES_OUT = Effect("calls torch.linalg.matrix_rank, perhaps with out=, which torch leaves unwritten in a capture",
                    "take its result, and copy_ that", ANYONE)  # fmt: skip
_SPREADS = opmap["CALL_FUNCTION_EX"]


def _may_give_out(code: CodeType) -> bool:
    """Whether code calls something with `out=`, or perhaps so (``f(**kwargs)``)."""
    return _SPREADS in code.co_code[::2] or any("out" in names for names in code.co_consts if type(names) is tuple)


EXPORT = "data_ptr"  # of tensors and storages: who watches the call decides
BEGINS_GROUP = "_start_coalescing"  # of collectives, which begin together where it ends
_FAR = Effect("communicates with other ranks ({})", REMEDY, ANYONE)
_SETS_UP = Effect("sets up a pipeline with the other ranks, as in the first step or after an evaluation", "", ANYONE, OnlyNow)
_OF_C10D: dict[str, Effect] = {
    **{n: Effect(f"uses a store that it shares with other ranks ({n})") for n in (
        "set", "get", "add", "check", "delete_key", "compare_set", "append", "multi_get", "multi_set", "num_keys", "list_keys",
        "queue_push", "queue_pop", "queue_len",
    )},
    **{n: Effect(f"asks how far a collective is ({n})") for n in (
        "is_completed", "is_success", "exception", "result", "get_future", "get_future_result",
    )},
    **{n: _FAR._replace(reason=_FAR.reason.format(n)) for n in (BEGINS_GROUP, "_group_start")},
}  # fmt: skip
"""Methods of C++ objects there, which do not tell whose they are."""
_C10D = "torch._C._distributed_c10d"

# -- methods of built-in objects: by name, the owners for which it is an effect


def _is_date(owner: object) -> bool:
    return isinstance(owner, type) and issubclass(owner, datetime.date)


def _a(*kinds: type) -> Callable[[object], bool]:
    return lambda owner: isinstance(owner, kinds)


def _of_module(name: str) -> Callable[[object], bool]:
    return lambda owner: any(kind.__module__ == name for kind in type(owner).__mro__)


def _not_here(owner: object) -> bool:
    """Whether this is a generator, and not of the current GPU, which follows whole states by itself."""
    return isinstance(owner, torch.Generator) and not (
        owner.device.type == "cuda" and is_of(owner, named(torch.device("cuda")))
    )


_Rule = tuple[Callable[[object], bool], Effect]


def _methods(names: str, owners: Callable[[object], bool], effect: Callable[[str], Effect]) -> list[tuple[str, _Rule]]:
    return [(n, (owners, effect(n))) for n in names.split()]


_BY_NAME: dict[str, list[_Rule]] = {}
for _name, _rule in (
    *_methods("manual_seed seed set_state set_offset", _a(torch.Generator),
              lambda n: Effect(f"sets the state of a random generator ({n})", "seed it before the call", ANYONE)),
    *_methods("graphsafe_set_state graphsafe_get_state", _not_here,
              lambda n: Effect(f"uses the state of a random generator of another device ({n})", by=ANYONE)),
    *_methods("get_state initial_seed clone_state get_offset", _a(torch.Generator),
              lambda n: Effect(f"reads the state of a random generator ({n})", _PASS, by=DIRECTLY)),
    *_methods("now utcnow today", _is_date, lambda n: Effect(f"reads the clock ({n})", _PASS, by=DIRECTLY)),
    *_methods("write writelines", _a(object), lambda n: Effect(f"writes output ({n})")),
    *_methods("flush", _a(object), lambda n: Effect(f"writes output ({n})", by=DIRECTLY)),
    *_methods("writerow writerows", _a(type(_csv.writer(io.StringIO()))), lambda n: Effect(f"writes output ({n})")),
    *_methods("read read1 readline readlines readinto readinto1 readall seek truncate close detach __next__", _a(io.IOBase),
              lambda n: Effect(f"uses a file ({n})", by=DIRECTLY)),
    *_methods("put put_nowait get get_nowait qsize empty", _a(_queue.SimpleQueue),
              lambda n: Effect(f"uses a queue ({n})", by=DIRECTLY)),
    *_methods("connect connect_ex bind listen _accept send sendall sendto sendmsg recv recv_into recvfrom recvfrom_into "
              "recvmsg recvmsg_into shutdown", _a(_socket.socket), lambda n: Effect(f"uses a socket ({n})")),
    *_methods("execute executemany executescript commit rollback fetchone fetchmany fetchall", _of_module("sqlite3"),
              lambda n: Effect(f"uses a database ({n})")),
    *_methods("acquire release locked", _a(type(threading.Lock()), type(threading.RLock())),
              lambda n: Effect(f"works with other threads ({n})", by=DIRECTLY)),
    *_methods("acquire release __enter__ __exit__", _of_module("_multiprocessing"),
              lambda n: Effect(f"works with other processes ({n})")),
    *_methods("done result exception cancelled cancel set_result set_exception", _of_module("_asyncio"),
              lambda n: Effect(f"works with other tasks ({n})", by=DIRECTLY)),
    *_methods("set reset", _a(contextvars.ContextVar), lambda n: Effect(f"changes a context variable ({n})", by=DIRECTLY)),
):  # fmt: skip
    _BY_NAME.setdefault(_name, []).append(_rule)

_CHANGES = {"append", "extend", "insert", "pop", "remove", "clear", "update", "add", "discard", "setdefault", "popitem",
            "appendleft", "extendleft", "popleft", "rotate", "sort", "reverse", "difference_update", "intersection_update",
            "symmetric_difference_update", "move_to_end", "__setitem__", "__delitem__", "__iadd__", "__next__"}  # fmt: skip

_DRAWS = {"random", "getrandbits"}  # all other methods of Python's generators are made of these

_ASKED = {*_DRAWS, EXPORT, _RANK.__name__}

told_names = frozenset({f.__name__ for f in _FUNCTIONS} | _BY_NAME.keys() | _OF_C10D.keys() | _CHANGES | _ASKED)
"""The names of all built-in functions and methods that may be an effect: any other needs no further look."""

_EFFECTS = [(f.__name__, e) for f, e in _FUNCTIONS.items()] + [(n, e) for n, rules in _BY_NAME.items() for _, e in rules]
_LIBRARY_NAMES = frozenset([*_ASKED, *(n for n, e in _EFFECTS if e.by in (ANYONE, OTHERS))])
_STDLIB_NAMES = _LIBRARY_NAMES | {n for n, e in _EFFECTS if e.by is USERS} | {"_urandom"}  # as `random` calls os.urandom


def mentions(filename: str, names: tuple[str, ...]) -> bool:
    """Whether code of this file that mentions these names may call something that is an effect there. (Ours does not, and runs
    for each operator.)"""
    if is_ours(filename):
        return False
    whose = origin(filename)
    if whose is USER:
        return True
    return not (_STDLIB_NAMES if whose is STDLIB else _LIBRARY_NAMES).isdisjoint(names)


def of_call(function: Callable[..., object], owner: object, frame: FrameType, outer: set[int]) -> Effect | None:
    """What it means that `frame` calls this built-in function, or this method of `owner`. `outer` are the ids of objects
    that were there before the call."""
    effect = _FUNCTIONS.get(function)
    if function is _RANK:
        return _LOSES_OUT if _may_give_out(frame.f_code) else None
    if function.__name__ == "set_state" and sets_for_torch(frame):
        return None  # heard where that function started
    if effect is None and function.__name__ in _OF_C10D and getattr(function, "__module__", None) == _C10D:
        effect = _OF_C10D[function.__name__]
    if effect is None:
        effect = _of_method(function.__name__, owner, outer)
    return effect if effect is not None and effect.counts(frame) else None


def _of_method(name: str, owner: object, outer: set[int]) -> Effect | None:
    for applies, effect in _BY_NAME.get(name, ()):
        if applies(owner):
            return effect
    if name in _DRAWS and isinstance(owner, random.Random) and (owner is random._inst or identity(owner) in outer):
        return Effect("draws random numbers on the host (random)", _DRAW, ANYONE)
    if name in _CHANGES and identity(owner) in outer:
        kind = type(owner).__name__
        return Effect(f"changes a {kind} that outlives the call ({name})", "return the value and do it outside", DIRECTLY)
    return None


# -- Python functions

Starts = Mapping[str, list[tuple[str, Callable[[FrameType], bool], Effect]]]
"""By the name of a function: the end of its file's name (a whole path where possible), a condition, and the effect."""


def together(*starts: Starts) -> Starts:
    """All of these."""
    names = chain.from_iterable(starts)
    return {name: [*chain.from_iterable(each.get(name, ()) for each in starts)] for name in names}


_LIB, _TORCH = os.path.dirname(threading.__file__), os.path.dirname(torch.__file__)


def _always(frame: FrameType) -> bool:
    return True


def _of_the_system(frame: FrameType) -> bool:
    return isinstance(frame.f_locals.get("self"), random.SystemRandom)


def _is_told(frame: FrameType) -> bool:
    """Not the getter of a property."""
    return frame.f_code.co_argcount > 1 or "self" not in frame.f_locals


def _seeds(frame: FrameType) -> bool:
    """Not the constructor of a generator that is given a seed."""
    caller = frame.f_back.f_code if frame.f_back is not None else frame.f_code
    made_here = caller.co_name == "__init__" and caller.co_filename == frame.f_code.co_filename
    return not (made_here and frame.f_locals.get("a") is not None)


def _not_theirs(frame: FrameType) -> bool:
    """The insides of the user's own functions are watched anyway."""
    return origin(frame.f_code.co_filename) is not USER


_Start = tuple[str, Callable[[FrameType], bool], Effect]


def _functions(path: str, names: str, effect: Effect, when: Callable[[FrameType], bool] = _always) -> list[tuple[str, _Start]]:
    path = path.replace("/", os.sep)
    return [(n, (path, when, effect._replace(reason=effect.reason.format(n)))) for n in names.split()]


_STARTS: dict[str, list[_Start]] = {}
for _name, _start in (
    *_functions(f"{_TORCH}/_tensor_str.py", "_str", Effect("prints a tensor, which reads its values on the host",
                "return the tensor and print it outside", ANYONE)),
    *_functions(f"{_LIB}/logging/__init__.py", "_log handle", Effect("logs a message", by=ANYONE)),
    *_functions(f"{_LIB}/logging/__init__.py", "debug info warning warn error exception critical fatal log isEnabledFor "
                "getEffectiveLevel", Effect("logs a message ({})"), decides_itself),
    *_functions(".py", "write writelines", Effect("writes output ({})"), _not_theirs),
    *_functions(f"{_LIB}/random.py", "random getrandbits randbytes", Effect("reads entropy of the system", _DRAW),
                _of_the_system),
    *_functions(f"{_LIB}/random.py", "seed", Effect("seeds a random generator", _DRAW), _seeds),
    *_functions(f"{_LIB}/random.py", "getstate", Effect("reads the state of a random generator ({})", _PASS)),
    *_functions(f"{_LIB}/random.py", "setstate", Effect("sets the state of a random generator ({})")),
    *_functions(f"{_LIB}/uuid.py", "uuid1 uuid4 uuid6 uuid7 uuid8", Effect("makes a new {}", _DRAW)),
    *_functions(f"{_TORCH}/random.py", "initial_seed", Effect("reads torch's seed", _PASS)),
    *_functions(f"{_TORCH}/cuda/random.py", "initial_seed", Effect("reads torch's seed", _PASS)),
    *_functions(f"{_TORCH}/serialization.py", "save load", Effect("calls torch.{}")),
    *_functions(f"{_LIB}/queue.py", "put get put_nowait get_nowait task_done join qsize empty full",
                Effect("uses a queue ({})")),
    *_functions(f"{_LIB}/threading.py", "set clear wait is_set notify notify_all acquire release start join",
                Effect("works with other threads ({})")),
    *_functions(f"{_LIB}/threading.py", "current_thread main_thread active_count", Effect("asks which thread runs it ({})",
                _PASS, DIRECTLY)),
    *_functions(f"{_TORCH}/utils/data/_utils/worker.py", "get_worker_info", Effect("asks which process runs it ({})", _PASS)),
    *_functions(f"{_LIB}/asyncio/tasks.py", "current_task all_tasks", Effect("asks which task runs it ({})", _PASS, DIRECTLY)),
    *_functions(f"{_LIB}/asyncio/queues.py", "put_nowait get_nowait qsize empty full", Effect("uses a queue ({})")),
    *_functions(f"{_LIB}/asyncio/locks.py", "set clear is_set locked release", Effect("works with other tasks ({})")),
    *_functions(f"{_LIB}/asyncio/base_events.py", "time call_soon call_later call_at create_task call_soon_threadsafe",
                Effect("works with other tasks ({})", by=DIRECTLY)),
    *_functions(f"{_LIB}/multiprocessing/synchronize.py", "set clear wait is_set notify notify_all acquire release",
                Effect("works with other processes ({})")),
    *_functions(f"{_LIB}/logging/__init__.py", "setLevel disable", Effect("changes what is logged ({})"), _is_told),
    *_functions(f"{_LIB}/concurrent/futures/_base.py", "done result exception cancelled running",
                Effect("works with other threads ({})", by=DIRECTLY)),
    *_functions(f"{_LIB}/concurrent/futures/thread.py", "submit", Effect("works with other threads ({})")),
    *_functions(f"{_LIB}/concurrent/futures/process.py", "submit", Effect("works with other processes ({})")),
    *_functions(f"{_LIB}/multiprocessing/process.py", "start join", Effect("works with other processes ({})")),
    *_functions(f"{_LIB}/multiprocessing/queues.py", "put get put_nowait get_nowait qsize empty full",
                Effect("uses a queue ({})")),
    *_functions(f"{_LIB}/multiprocessing/connection.py", "send send_bytes recv recv_bytes recv_bytes_into poll",
                Effect("works with other processes ({})")),
    *_functions(f"{_LIB}/subprocess.py", "_execute_child", Effect("starts a process")),
    *_functions(f"{_TORCH}/distributed/distributed_c10d.py", "all_gather_object gather_object "
                "broadcast_object_list scatter_object_list send_object_list recv_object_list monitored_barrier", _FAR),
    *_functions(f"{_TORCH}/distributed/distributed_c10d.py", "init_process_group destroy_process_group new_group "
                "_new_group_with_tag split_group shrink_group _abort_process_group",
                Effect("makes or ends a process group ({})", by=ANYONE)),
    *_functions(f"{_TORCH}/distributed/rpc/api.py", "rpc_sync rpc_async remote", _FAR),
    *_functions(f"{_TORCH}/distributed/pipelining/schedules.py", "_warmup_p2p", _SETS_UP),
    *_functions(f"{_TORCH}/distributed/pipelining/stage.py", "_prepare_forward_infra _prepare_backward_infra", _SETS_UP),
):  # fmt: skip
    _STARTS.setdefault(_name, []).append(_start)


def of_start(frame: FrameType, more: Starts) -> Effect | None:
    """What it means that this Python function starts. `more` are functions that a device refuses besides."""
    code = frame.f_code
    for starts in (_STARTS, more):
        for path, when, effect in starts.get(code.co_name, ()):
            if code.co_filename.endswith(path) and effect.counts(frame.f_back) and when(frame):
                return effect
    return None


def refusable(filename: str, name: str, more: Starts) -> bool:
    """Whether the start of this function may be an effect, depending on the frame."""
    return any(filename.endswith(path) for starts in (_STARTS, more) for path, _, _ in starts.get(name, ()))


start_names = frozenset(_STARTS)
"""The names of all functions of which the start may be an effect on any device."""
