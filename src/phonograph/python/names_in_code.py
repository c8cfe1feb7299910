"""What the user's code mentions, and so may do: read an attribute, look at a gradient, start a thread.

It is told from the code of the functions in reach, without running it. That can fall short: a library calls a method which
nothing names, or a constructor runs that nobody seemed to call. So what really ran in a capture is compared with what was
known (`unknown`, `lacks`, `overlooked`), and the function is looked at again with the names that were lacking.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from types import CodeType

from .bytecode import (
    LOOKUPS,
    MODULES,
    SPACES,
    Used,
    all_within,
    catches,
    looks_around,
    matches,
    names_in,
    read_at,
    used_in,
)
from .handlers import generators_catch
from .introspection import asks_identity
from .origin import is_torchs, is_users
from .places import place

__all__ = ["CONSTRUCTORS", "CYCLED", "EVALUATED", "HISTORY", "LIVE", "Mentions", "is_written", "likeness"]

# Hyper-parameters of optimizers that a replay can follow (`guards/hyperparameters.py`): those that change in nearly every
# program, and those that some schedulers cycle, which are given up first where not all can be followed.
LIVE, CYCLED = ("lr", "weight_decay"), ("momentum", "betas")
CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})
# By which code reads them.
_SETTINGS = frozenset({*LIVE, "param_groups", "state_dict", "get_last_lr", "defaults", "vars", "__dict__"})
_THREADS = frozenset({"Thread", "submit", "ThreadPoolExecutor", "start_new_thread", "run_in_executor", "to_thread",
                      "default_stream", "set_stream",
                      "record_stream"})  # fmt: skip  # which the allocator forgets while it allocates in a graph's pool
HISTORY = frozenset({"is_leaf", "grad_fn", "is_inference", "retains_grad"})
_ABSENT = frozenset({"getattr", "hasattr", "AttributeError", "vars", "__dict__", "suppress"})  # by which an attribute is missed
# Functions that read attributes which no code need name: of texts, or of all.
_UNSEEN = frozenset({"format", "format_map", "copy", "deepcopy", "getmembers", "getmembers_static", "asdict", "astuple",
                     "dumps", "dump", "replace"})  # fmt: skip
EVALUATED = "<module>"  # the name of what `eval` and `exec` run
_NO_FUNCTIONS = frozenset({"<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"})
_WRITTEN = frozenset({"__init__", "__repr__", "__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__setattr__",
                      "__delattr__", "__replace__"})  # fmt: skip  # by `dataclass`
_RESUMES = ("torch_dynamo_resume_in_", "__resume_at_")  # what torch.compile makes of the rest of a function
_ANYTHING = "__dict__"  # as a name that was lacking: some code reads attributes that it does not name


class Mentions:
    """What the functions that were added mention; `heard` are names that an earlier look lacked.

    `names` are all of them, `reads` those by which an attribute may be read: not those of constructors, which run only where an
    object is made.
    """

    def __init__(self, heard: Iterable[str] = ()) -> None:
        self.names: set[str] = set(heard)
        self.reads: set[str] = set(heard)
        self.looks_around = _ANYTHING in self.reads  # whether attributes may be read that are not named: `getattr(x, name)`
        self.reads_settings = not _SETTINGS.isdisjoint(self.reads)  # of an optimizer
        self.looks_around_unknown = False  # of what has no name, or a local one
        self.looks_past = False  # whether it may look at attributes past `__getattribute__`
        self.looks_unseen = False  # whether what does so may be no code
        self.asks_identity = False  # whether code may ask which object it has
        self.keyed_by_identity = False  # whether something is found by which object it is
        self.bare: set[str] = set()  # see `Used`
        self.spaces = False  # whether code may get at global variables otherwise than as such, by any name in code...
        self.computes_globals = False  # ...or by names that do not
        self.gets_modules = False  # whether it may so get at modules
        self.looks_for_absent = False  # whether it may ask for an attribute that is not there yet
        self.generators_catch = False  # whether they run code after an exception of whoever goes through what they give
        self.words: set[str] = set()  # names by which what is no code reads attributes
        self._matches = False
        self._added: list[CodeType] = []
        self._known: set[tuple[object, ...]] = set()  # what was added, and the functions in it

    def add(self, code: CodeType, name: str) -> tuple[Set[str], Used]:
        """A function of the user's called `name` is in reach. Returns what it mentions, and what it does with that."""
        named, used = names_in(code), used_in(code)
        self.names |= named
        self.spaces, self.computes_globals = self.spaces or used.spaces, self.computes_globals or used.computes
        self.gets_modules = self.gets_modules or used.modules
        self.looks_for_absent = self.looks_for_absent or not _ABSENT.isdisjoint(named) or catches(code)
        self._known.update(map(likeness, all_within(code)))
        self.bare |= used.bare
        self._matches = self._matches or matches(code)
        self._added.append(code)
        self.asks_identity = self.asks_identity or asks_identity(code)
        self.generators_catch = self.generators_catch or generators_catch(code)
        if name not in CONSTRUCTORS:
            self.add_reads(code)
        return named, used

    def add_reads(self, code: CodeType) -> None:
        """This code may run, and read what it names."""
        self.reads |= names_in(code)
        self.looks_around = self.looks_around or looks_around(code)
        self.reads_settings = self.reads_settings or _reads_settings(code)

    def add_words(self, words: Set[str]) -> None:
        """Names by which an object that is no code reads attributes."""
        self.names |= words
        self.reads |= words
        self.words |= words

    def add_lookup(self, name: str) -> None:
        """A function of the standard library's, or a built-in one, is in reach, perhaps by another name than its own, for which
        code is searched."""
        if name in LOOKUPS:
            self.looks_anywhere()
        self.looks_past = self.looks_past or name == "__getattribute__"
        if name in SPACES:
            self.spaces = self.computes_globals = True
        self.gets_modules = self.gets_modules or name in MODULES
        self.looks_unseen = self.looks_unseen or name in _UNSEEN

    def looks_anywhere(self) -> None:
        """Some code may read attributes that it does not name, of anything."""
        self.looks_around = self.looks_around_unknown = self.looks_for_absent = self.looks_unseen = True

    @property
    def names_globals(self) -> bool:
        """Whether some code may get at global variables otherwise than as such, by any name that stands in code."""
        return self.spaces or self.gets_modules

    @property
    def asks_kind(self) -> bool:
        """Whether some code may ask of which class an object is."""
        return not self.names.isdisjoint({"isinstance", "issubclass"}) or self._matches

    @property
    def asks_history(self) -> bool:
        """Whether some code may ask for an argument's place in a graph of autograd's."""
        return not self.names.isdisjoint(HISTORY)

    @property
    def reads_gradients(self) -> bool:
        """Whether some code may look at a gradient."""
        return "grad" in self.names

    @property
    def minds_gradients(self) -> bool:
        """Whether some code may decide something by whether a gradient is there, as optimizers do."""
        return any(word in name for name in self.names for word in ("grad", "step", "clip"))

    @property
    def orders_streams(self) -> bool:
        """Whether some code may rely on which stream is current, with threads of its own for instance."""
        return not self.names.isdisjoint(_THREADS)

    def read_at(self, name: str) -> str:
        """Where code first reads a variable, an attribute or an item of this name: ``file:line``, or "" if none does."""
        return next((place(code.co_filename, line) for code in self._added for line in read_at(code, name)), "")

    # -- afterwards

    def unknown(self, code: CodeType) -> bool:
        """Whether this is code of a function of the user's that was not added, or was evaluated there."""
        if not is_users(code.co_filename) or code.co_name in _NO_FUNCTIONS or code.co_name.startswith(_RESUMES):
            return False
        return not is_written(code) and likeness(code) not in self._known

    def knows_alike(self, code: CodeType) -> bool:
        """Whether code was added that cannot be told from this one when it runs."""
        return likeness(code) in self._known

    def lacks(self, name: str) -> bool:
        """Whether a function was perhaps left out only because nothing names it."""
        return name not in self.names and name.isidentifier()

    def overlooked(self, ran: Iterable[CodeType], unread: Set[str]) -> frozenset[str]:
        """Names that are lacking, going by the code that ran: of attributes among those that did not seem to be read
        (`unread`), of settings of optimizers."""
        found: set[str] = set()
        for code in ran:
            if is_torchs(code.co_filename):
                continue
            if unread and not self.looks_around:
                found |= unread & names_in(code)
                if is_users(code.co_filename) and looks_around(code):
                    found.add(_ANYTHING)
            if is_users(code.co_filename):
                found |= (names_in(code) & {*CYCLED}) - self.names
                if not self.reads_settings and _reads_settings(code):
                    found.add("param_groups")
        return frozenset(found)


def is_written(code: CodeType) -> bool:
    """Whether this is a method that `dataclass` has written."""
    return code.co_filename == "<string>" and code.co_name in _WRITTEN


def likeness(code: CodeType) -> tuple[object, ...]:
    """What code has in common with what torch.compile makes of it; of what is evaluated, with the same evaluated again."""
    if code.co_name == EVALUATED:
        return (code.co_filename, code)
    return (code.co_filename, code.co_firstlineno, code.co_name, code.co_argcount, code.co_freevars)


def _reads_settings(code: CodeType) -> bool:
    return not _SETTINGS.isdisjoint(names_in(code, tuples=False))  # `lr=` in a call is no look at one
