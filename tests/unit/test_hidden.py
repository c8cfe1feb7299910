"""Our own code is out of Dynamo's sight: all of it, and nobody else's."""

import gc
import sys
from types import FunctionType

import phonograph.compile
from phonograph._torch import skipped_frames as hidden

_BY_WITNESS = {"_noting.<locals>.noted", "noted"}  # which marks each by itself


def test_all_of_our_code_and_no_other_is_hidden():
    found = set(hidden._codes([vars(sys.modules[name]) for name in hidden._hidden]))
    assert {code.co_filename.startswith(hidden._WRITTEN) for code in found} == {True}
    modules = {getattr(sys.modules[name], "__file__", None) for name in hidden._hidden}
    assert phonograph.compile.__file__ in modules
    functions = [f for f in gc.get_objects() if type(f) is FunctionType and f.__code__.co_filename in modules]
    overloads = {"record", "make_graphed_callables"}  # what stands there for type checkers
    code_of = {f.__code__ for f in functions if f.__name__ not in overloads and hidden._ours(f.__module__)}
    replaced = {code for code in code_of if code not in found}
    assert {code.co_qualname if hasattr(code, "co_qualname") else code.co_name for code in replaced} <= _BY_WITNESS
