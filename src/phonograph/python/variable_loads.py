"""Where code loads a variable that it does not own, or an attribute by name: told from its instructions, for whoever hears them
run one by one.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Mapping
from types import CodeType
from typing import NamedTuple

from .code_cache import of_code

__all__ = ["ATTRIBUTE", "CELL", "GLOBAL", "Load", "globals_of", "loads_in"]

CELL, GLOBAL, ATTRIBUTE = "a cell", "a global variable", "an attribute"
_OF_SPACE = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL"})
_OPS_OF_SPACE = {
    op: int(name == "LOAD_GLOBAL" and sys.version_info >= (3, 11)) for name, op in dis.opmap.items() if name in _OF_SPACE
}
"""Their numbers, and by how many bits the index of the name is shifted."""
_SILENT = frozenset({"CACHE", "PUSH_NULL", "PRECALL", "EXTENDED_ARG", "NOP", "RESUME"})


class Load(NamedTuple):
    """An instruction that loads a variable of this name, or an attribute: of what another loads (`of`), if that is known.
    Whether nothing is done with it but to compare it with None. The offset of the instruction."""

    kind: str
    name: str
    of: Load | None
    compared: bool
    at: int


@of_code
def loads_in(code: CodeType) -> Mapping[int, Load]:
    """What the instructions of code load, by their offsets (and those of their caches)."""
    found: dict[int, Load] = {}
    heard = [i for i in dis.get_instructions(code) if i.opname not in _SILENT]
    before: Load | None = None
    for n, i in enumerate(heard[:-1]):
        kind, of, before = _kind(i.opname), None if i.is_jump_target else before, None
        if kind:
            compared = _compares_with_none(heard[n + 1 : n + 3])
            before = Load(kind, str(i.argval), of if kind is ATTRIBUTE else None, compared, i.offset)
            found |= dict.fromkeys(range(i.offset, heard[n + 1].offset, 2), before)
    return found


@of_code
def globals_of(code: CodeType) -> frozenset[str]:
    """The global variables that code loads, sets or deletes."""
    found, more = set[int](), 0
    for op, arg in zip(code.co_code[::2], code.co_code[1::2], strict=True):  # (`dis` takes ten times as long)
        if op in _OPS_OF_SPACE:
            found.add((more | arg) >> _OPS_OF_SPACE[op])
        more = (more | arg) << 8 if op == dis.EXTENDED_ARG else 0
    return frozenset(code.co_names[i] for i in found)


def _kind(opname: str) -> str:
    if opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
        return GLOBAL
    if opname in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"):
        return CELL
    return ATTRIBUTE if opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER", "IMPORT_FROM")) else ""


def _compares_with_none(following: list[dis.Instruction]) -> bool:
    """Whether nothing is done with what was loaded but to ask whether it is there (``log is not None``)."""
    if following[0].opname.endswith(("_IF_NONE", "_IF_NOT_NONE")):
        return True
    asks = len(following) > 1 and following[1].opname == "IS_OP"
    return asks and following[0].opname == "LOAD_CONST" and following[0].argval is None
