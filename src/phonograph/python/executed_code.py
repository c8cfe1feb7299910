"""What the code that ran in a call names: only of that can a replay depend, among the attributes of the user's own objects.

Before a call it is not known what will run. So all that has the name of what is called is looked at, and a trainer's `train()`
is, because the step calls the model's. Afterwards it is known. What an attribute holds that no code that ran names does not
count, if nothing that ran reads attributes that it does not name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Sequence, Set
from types import CodeType
from typing import NamedTuple

from .bytecode import (
    asks_its_base,
    formats_any,
    items_set,
    looks_around,
    matches,
    names_in,
    slight_use_in,
    used_in_full,
)
from .identity import identity
from .introspection import asks_identity
from .names_in_code import is_written, likeness
from .origin import LIBRARY, is_ours, is_torchs, is_users, origin
from .read_gate import BY_NAME, STATIC, Reads
from .unnamed_reads import goes_through_objects, reads_any_of

__all__ = ["REFLECTS", "Ran", "is_resumed"]

_NONE = frozenset[str]()
# By which code may read what a function is bound to, though it does not run.
REFLECTS = frozenset({"__closure__", "cell_contents", "__globals__", "f_locals", "f_globals", "f_back", "getclosurevars",
                       "get_objects", "get_referents", "get_referrers"})  # fmt: skip
_WRITES = frozenset({"__setattr__", "__delattr__"})  # by which code may write attributes past the gate where that is noted
_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class _Use(NamedTuple):
    """Whether all that code does with an attribute is to count it, to call it, to set it."""

    counts: bool
    calls: bool
    sets: bool


class Ran:
    """All code that ran in a call."""

    def __init__(
        self, called: Collection[CodeType], elsewhere: Collection[CodeType], reads: Reads | None = None,
        functions: Sequence[tuple[CodeType, dict[str, object]]] = (),
    ) -> None:  # fmt: skip
        """`called` by it, and what ran meanwhile `elsewhere`, in the garbage collector, say. What was noted that it `reads`. Of
        the `functions` among that the globals are known."""
        codes = [*called, *elsewhere]
        files = {identity(code): str(names.get("__file__", "")) for code, names in functions if is_written(code)}
        others = [code for code in codes if not is_torchs(files.get(identity(code), code.co_filename))]
        users = [code for code in others if is_users(code.co_filename)]
        by_users = _NONE.union(*map(names_in, users))
        self._likenesses = {*map(likeness, codes)}
        self._names: Set[str] = _NONE.union(*map(names_in, others))
        # But a method of that name writes to an object whose class has it.
        writing = [code for code in users if not (code.co_name in _WRITES or is_written(code))]
        passing = [code for code in others if code is not STATIC and "__getattribute__" in names_in(code)]
        past = not all(map(asks_its_base, passing)) or "__get__" in by_users
        past = past or not _WRITES.isdisjoint(_NONE.union(*map(names_in, writing)))
        self.reads = reads if reads is not None and reads.certain and not past else None
        """What it has read of objects, if that is known."""
        torchs = [code for code in codes if is_torchs(at := files.get(identity(code), code.co_filename)) and not is_ours(at)]
        self._torchs: Set[str] = _NONE.union(*map(names_in, torchs))
        self._torchs_codes, self._functions = torchs, functions
        self._others = others
        self._uses: dict[str, _Use] = {}
        asked = self.reads.asked if self.reads is not None and BY_NAME not in elsewhere else None
        self._names |= asked or _NONE
        self._elsewhere = _NONE.union(*map(names_in, elsewhere), asked or ())
        around = any(map(looks_around, users)) or any(map(formats_any, users))
        through = filter(goes_through_objects, others)
        self.looks_around = around or any(code is not BY_NAME or asked is None for code in through)
        """Whether it may read attributes that it does not name."""
        self.reflects = not by_users.isdisjoint(REFLECTS)
        self.matches = any(map(matches, others))
        self.asks_identity = any(map(asks_identity, users))
        """Whether it may ask which object it has."""
        self.packages_look_around = any(map(_looks_around_in_a_package, others))
        """Whether code of a package may read attributes that it does not name, of whatever it works with."""

    def untouched(self, value: object) -> bool:
        """Whether it has not come to this, which it was not allowed to touch."""
        return self.reads is not None and identity(value) in self.reads.untouched

    def has(self, code: CodeType) -> bool:
        """Whether it is, or may be, among it: from Python 3.12 on only the start of a generator is heard."""
        return likeness(code) in self._likenesses or is_resumed(code)

    def names(self, attribute: str, *, of_module: bool) -> bool:
        """Whether it may read such an attribute. Torch's own code knows those of modules only."""
        return attribute in self._names or (of_module and attribute in self._torchs)

    def is_torchs(self, attribute: str) -> bool:
        """Whether nobody's code but torch's names such an attribute."""
        return attribute not in self._names

    def counts(self, attribute: str, *, of_module: bool) -> bool:
        """Whether it does nothing with such an attribute but to add numbers to it, and to call what has it."""
        return self._use_of(attribute).counts and not (of_module and attribute in self._torchs)

    def sets(self, attribute: str, *, of_module: bool) -> bool:
        """Whether it sets it, and does not read it before it has."""
        return self._use_of(attribute).sets and not (of_module and attribute in self._torchs)

    def is_set_by_torch(self, attribute: str, kind: type) -> bool:
        """Whether nobody's code but torch's names such an attribute of such an object, and that sets it, and does not read it
        before it has."""
        naming = [code for code in self._torchs_codes if attribute in names_in(code)]
        beside = [code for code in self._torchs_codes if code.co_filename in {one.co_filename for one in naming}]
        sets = bool(naming) and self.is_torchs(attribute) and all(attribute in slight_use_in(code).sets for code in naming)
        if not sets or any(map(looks_around, beside)):
            return False
        return not issubclass(kind, reads_any_of(one for one in self._functions if not is_torchs(one[0].co_filename)))

    def fills(self, name: str, *, of_module: bool) -> bool:
        """Whether all that it does with what has this name, an attribute or a variable, is to append to it, or to set items."""
        if self.looks_around or self.packages_look_around or (of_module and name in self._torchs):
            return False
        return name not in self._used_in_full and name not in self._elsewhere

    def items_set(self, name: str) -> frozenset[object]:
        """The keys of items that it sets of what has this name; `ANY_KEY` is among them for others."""
        return frozenset[object]().union(*(items_set(code).get(name, ()) for code in self._naming.get(name, ())))

    @functools.cached_property
    def _used_in_full(self) -> frozenset[str]:
        return _NONE.union(*map(used_in_full, self._others))

    def slightly(self, attribute: str, value: object, *, of_module: bool) -> bool:
        """Whether no more than the kind of what this attribute holds can matter: a number that is counted."""
        return type(value) is int and self.counts(attribute, of_module=of_module)

    def _use_of(self, attribute: str) -> _Use:
        """What it does with such an attribute: told from the code that names it, where that is asked for."""
        use = self._uses.get(attribute)
        if use is None:
            found = [slight_use_in(code) for code in self._naming.get(attribute, ())]
            counts, calls, sets = (any(attribute in one[i] for one in found) for i in range(3))
            rest = attribute in self._elsewhere or any(attribute in one.rest for one in found)
            use = self._uses[attribute] = _Use(counts and not (sets or rest), calls and not (counts or sets or rest),
                                               sets and not (counts or calls or rest))  # fmt: skip
        return use

    @functools.cached_property
    def _naming(self) -> dict[str, list[CodeType]]:
        """By names, the code that has them."""
        found: dict[str, list[CodeType]] = {}
        for code in self._others:
            for name in names_in(code):
                found.setdefault(name, []).append(code)
        return found


def is_resumed(code: CodeType) -> bool:
    """Whether a function with this code goes on where it was before."""
    return bool(code.co_flags & _RESUMED)


def _looks_around_in_a_package(code: CodeType) -> bool:
    if origin(code.co_filename) != LIBRARY:
        return False
    return looks_around(code) or formats_any(code)
