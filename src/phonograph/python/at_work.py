"""What a frame does right now with the values that C code has called a method of, told from its instructions."""

from __future__ import annotations

import dis
from types import FrameType

from .._torch.dynamic import Thing
from .introspection import own_dict

__all__ = ["asked_container", "is_spelled"]

_NOTHING = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "RESUME"})
_LOOK_UPS = (set.__contains__, frozenset.__contains__, dict.__contains__)


def is_spelled(frame: FrameType) -> bool:
    """Whether code of this frame has written that two values are added now. Where C code does it, it may go another way with
    numbers of Python's own: since Python 3.12 `sum` makes up for what floats lose."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("BINARY_", "INPLACE_"))


def asked_container(frame: FrameType) -> Thing:
    """The set or dictionary of which this frame asks now whether something is in it (``epoch in self.milestones``), if it is
    named there by variables and attributes alone; else None."""
    every = [i for i in dis.get_instructions(frame.f_code) if i.offset <= frame.f_lasti and i.opname not in _NOTHING]
    if every[-1].opname != "CONTAINS_OP":
        return None
    last = next(n for n, i in enumerate(reversed(every[:-1])) if i.opname != "LOAD_ATTR")
    found = _loaded(every[-2 - last], frame)
    for i in every[len(every) - 1 - last : -1]:
        found = (own_dict(found) or {}).get(i.argval)
    return found if getattr(type(found), "__contains__", None) in _LOOK_UPS else None


def _loaded(i: dis.Instruction, frame: FrameType) -> Thing:
    """What this instruction loads, the last of them."""
    name = i.argval[-1] if i.opname.startswith("LOAD_FAST") and isinstance(i.argval, tuple) else i.argval
    if i.opname == "LOAD_GLOBAL":
        return frame.f_globals.get(name)
    return name if i.opname == "LOAD_CONST" else frame.f_locals.get(name) if i.opname.startswith(_LOCAL) else None


_LOCAL = ("LOAD_FAST", "LOAD_DEREF", "LOAD_NAME")
