"""How a reason names what the user has written: an operator by the expression that calls it, an argument by its parameter, what
torch says of a failure by what failed. Names of operators (``aten::nonzero``) appear only where nothing else is known.
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch

from ..errors import Refusal
from ..python.code_cache import of_code
from ..python.origin import is_ours, is_users, users_frame
from ..python.places import place
from .pytree_nodes import Field

__all__ = [
    "COMPILED",
    "MARKED",
    "Failure",
    "Naming",
    "defined_at",
    "excerpt",
    "failure",
    "first_line",
    "innermost",
    "locating",
    "naming",
    "operator",
    "returned_at",
    "source_of",
]  # fmt: skip

_LONG = 60  # characters of an excerpt

MARKED = "or in a function that is marked @pg.live"
COMPILED = 'use torch.compile(..., backend="phonograph")'

# -- operators

# Where it is not the name of a function of torch's, or of a method: what people write that comes to it.
_WRITTEN = {
    "aten::_local_scalar_dense": ".item()",
    "aten::is_nonzero": "bool()",
    "aten::index": "x[mask]",
    "aten::index_put": "x[mask] = y",
    "aten::index_put_": "x[mask] = y",
    "aten::_index_put_impl_": "x[mask] = y",
    "aten::_unsafe_index_put": "x[mask] = y",
    "aten::nonzero_numpy": "torch.where(condition)",
    "aten::_unique": "torch.unique",
    "aten::_unique2": "torch.unique",
    "aten::unique_dim": "torch.unique",
    "aten::unique_consecutive": "torch.unique_consecutive",
    "aten::_to_copy": ".to()",
    "aten::copy_": ".copy_()",
    "aten::_resize_output_": "out=",
    "aten::_pack_padded_sequence": "pack_padded_sequence",
    "aten::_pad_packed_sequence": "pad_packed_sequence",
    "aten::_nested_tensor_from_mask_left_aligned": "nn.TransformerEncoder",
    "aten::_efficientzerotensor": "a derivative that is zero",  # no code: it stands without quotes
    "aten::lift_fresh": "torch.tensor",
}
_PLACES = (
    ("torch", torch), ("F", torch.nn.functional), ("torch.linalg", torch.linalg), ("torch.fft", torch.fft),
    ("torch.special", torch.special), ("Tensor", torch.Tensor),
)  # fmt: skip


def operator(name: str) -> str:
    """What people write for an operator (``aten::add_`` or ``aten::add_.Tensor``): ``Tensor.add_``. Its own name, if nobody
    writes it."""
    space, _, rest = name.partition("::")
    name = f"{space}::{rest.partition('.')[0]}" if space == "aten" else name
    if name in _WRITTEN or space != "aten":
        return _WRITTEN.get(name, name)
    own = name.removeprefix("aten::").removesuffix("_forward")
    for said, home in _PLACES:
        for short in (own, own.removeprefix(said.rpartition(".")[2] + "_"), own.lstrip("_")):
            if not short.startswith("_") and callable(getattr(home, short, None)):
                return f"{said}.{short}"
    return name


def source_of(name: str) -> str:
    """What calls this operator now, as the user has written it: the expression that runs, and what it comes to, if that is not
    to be seen there."""
    said, frame = operator(name), users_frame(sys._getframe(1))
    source = excerpt(frame.f_code, frame.f_lasti, frame.f_globals) if frame is not None else ""
    return naming(said, source, direct=frame is not None and frame is _first_of_others(sys._getframe(1)))


def naming(said: str, source: str, *, direct: bool) -> str:
    """How a reason names what goes on: by the `source` of the user's that does it `direct`, or in which it is found."""
    words = re.findall(r"\w+", said)
    quoted = said if said.startswith("a ") or not said else f"`{said}`"
    if source and (direct or not words or words[-1] in source):
        return f"`{source}`"
    return f"{quoted} in `{source}`" if source else quoted


def _first_of_others(frame: FrameType | None) -> FrameType | None:
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


# -- the source


def excerpt(code: CodeType, at: int, names: dict[str, object]) -> str:
    """The expression to which the instruction of code `at` a place belongs, as it stands in the source, and cut if it is long.
    "", where that is not known: before Python 3.11, for one."""
    if not hasattr(code, "co_positions"):
        return ""
    first, last, begin, end = next(islice(code.co_positions(), at // 2, None), (None,) * 4)
    if first is None or last is None or begin is None or end is None:
        return ""
    lines = [linecache.getline(code.co_filename, n, names).encode() for n in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    text = " ".join(b"".join([lines[0][begin:], *lines[1:]]).decode(errors="replace").split())
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."


def innermost(trace: TracebackType | None) -> tuple[str, str, bool]:
    """Where an exception has come through code of the user's last: the line, the excerpt, and whether that has called what
    raises it."""
    line, source, direct, last = "", "", False, False
    while trace is not None:
        frame, was = trace.tb_frame, last
        last = is_users(frame.f_code.co_filename)
        if last:
            line = place(frame.f_code.co_filename, trace.tb_lineno)
            source, direct = excerpt(frame.f_code, trace.tb_lasti, frame.f_globals), True
        elif was:
            direct = is_ours(frame.f_code.co_filename)
        trace = trace.tb_next
    return line, source, direct


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, without addresses; its class, where it says nothing."""
    return re.sub(r" (object )?at 0x[0-9a-f]+", "", str(error).strip().split("\n", 1)[0]) or type(error).__name__


def defined_at(function: object) -> str:
    """The line where a function of the user's begins, or the `forward` of a module: ``file:line``."""
    code = _code_of(function)
    return place(code.co_filename, code.co_firstlineno) if code is not None else ""


@contextmanager
def locating(line_for: Callable[[str], str]) -> Iterator[None]:
    """Give each refusal of the block that has no line the one for its reason."""
    try:
        yield
    except Refusal as refusal:
        refusal.where = refusal.where or line_for(refusal.reason)
        raise


def returned_at(function: object) -> str:
    """The line of the user's on which a function returns, if there is one only; else where it begins."""
    code = _code_of(function)
    if code is None:
        return ""
    lines = set(_returning(code))
    return place(code.co_filename, lines.pop()) if len(lines) == 1 else defined_at(function)


def _code_of(function: object) -> CodeType | None:
    owner = getattr(function, "__self__", None)
    found = [inspect.unwrap(function) if callable(function) else function]
    found += [getattr(type(x), name, None) for x in (owner, function) for name in ("forward", "__call__")]
    for one in found:
        code = getattr(one, "__code__", None)
        if isinstance(code, CodeType) and is_users(code.co_filename):
            return code
    return None


@of_code
def _returning(code: CodeType) -> list[int]:
    """The lines of `return` statements, and not that of the end of the function."""
    import dis

    found, line, before = list[int](), code.co_firstlineno, ""
    for i in dis.get_instructions(code):
        line = i.starts_line if isinstance(i.starts_line, int) and not isinstance(i.starts_line, bool) else line
        line = getattr(i, "line_number", None) or line
        if i.opname == "RETURN_VALUE" and before != "None":
            found.append(line)
        before = str(i.argval) if i.opname.startswith("LOAD_CONST") else ""
    return found


# -- arguments


class Naming:
    """How to name what lies at a path in the arguments of a function (0 or 1, for positions and keywords; a number or a name;
    and so on): ``batch['meta'][1]``."""

    def __init__(self, function: Any = None) -> None:
        try:
            own = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # of a function that is not Python's
            own = []
        self._places = [p.name for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._rest = next((p.name for p in own if p.kind is p.VAR_POSITIONAL), "")

    def __call__(self, path: Sequence[Any]) -> str:
        by_name, at, *inner = path
        first = str(at) if by_name else self._place(at)
        return first + "".join(f".{step}" if isinstance(step, Field) else f"[{step!r}]" for step in inner)

    def _place(self, at: int) -> str:
        if at < len(self._places):
            return self._places[at]
        return f"{self._rest}[{at - len(self._places)}]" if self._rest else f"argument {at}"


# -- what torch says


class Failure(NamedTuple):
    """A way in which torch fails in a capture: a part of what it `said`, and the `reason` and `remedy` that it comes to."""

    said: str
    reason: str
    remedy: str


_FAILURES = (
    Failure("support saved tensor hooks", "runs a transform of torch.func (grad, vjp, jacrev, hessian) whose result has a "
            "backward outside, and what it saves for that cannot be followed",
            "return results detached (y.detach()), or record the whole step with its backward"),
    Failure("Cannot access storage", "works with a tensor that has no memory of the usual kind (a sparse one, say)",
            f"use dense tensors, or do it outside the recorded function, {MARKED}"),
    Failure("have storage", "works with a tensor that has no memory of the usual kind (a sparse one, say)",
            f"use dense tensors, or do it outside the recorded function, {MARKED}"),
    Failure("invalid python storage", "works with a tensor of a subclass that has no memory of its own (DTensor, say)",
            "record a function that works with its local tensors"),
    Failure("leaf Variable that requires grad", "writes an argument that requires a gradient", "write x.clone() instead"),
    Failure("rule registered for HOP", "is an operator that runs functions (cond, while_loop, scan), which is not captured",
            f"use torch.where, or call it outside the recorded function, {MARKED}"),
    Failure("TorchScript interpreter", "runs TorchScript, in which something cannot be captured",
            "record the function or module that was scripted"),
    Failure("out of memory", "needs more memory than is left while it is captured",
            "a recording has memory of its own: record fewer shapes, set max_bytes=, or work on less at a time"),
)  # fmt: skip


def failure(error: BaseException, said: str, more: Sequence[Failure] = ()) -> tuple[str, str] | None:
    """The reason and the remedy for an exception that torch is known to raise in a capture, `said` being what has raised it."""
    for known in (*more, *_FAILURES):
        if known.said in str(error):
            return f"{said} {known.reason}".strip(), known.remedy
    return None
