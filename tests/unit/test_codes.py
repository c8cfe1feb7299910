"""What is worked out of code, once and for as long as it is there."""

import weakref

from phonograph.python.bytecode import names_in
from phonograph.python.code_cache import of_code


def made(text="a"):
    return compile(f"{text} + 1", "made.py", "eval")


def test_it_is_worked_out_once_for_each_code_object():
    worked = []
    names = of_code(lambda code: worked.append(code.co_names) or len(worked))
    one, other = made(), made()
    assert [names(one), names(one), names(other), names(one)] == [1, 1, 2, 1]


def test_it_goes_with_the_code():
    names = of_code(lambda code: code.co_names)
    code = made()
    gone = weakref.ref(code)
    assert names(code) == ("a",)
    del code
    assert gone() is None
    assert names(made("b")) == ("b",)


def test_a_text_is_the_name_of_a_module_from_when_there_is_one(monkeypatch):
    import sys

    code = compile("look('found.later')", "made.py", "eval")
    assert names_in(code) == {"look", "found", "later"}
    monkeypatch.setitem(sys.modules, "found.later", sys)
    assert names_in(code) == {"look", "found.later"}
