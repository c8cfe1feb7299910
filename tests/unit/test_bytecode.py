"""What code tells about itself, on each version of Python."""

import dataclasses

import pytest

from phonograph.python.bytecode import (
    asks_its_base,
    catches,
    formats_any,
    hands_out,
    looks_around_itself,
    read_at,
    slight_use_in,
    used_in,
)
from phonograph.python.introspection import hands_on

AROUND = {
    "getattr(self, n)": "self",
    "getattr(self, n, None)": "self",
    "getattr(self, f'layer{n}')": "self",
    "getattr(self, 'a' + n)": "self",
    "getattr(cfg, n)": "cfg",
    "getattr(cfg.sub, n)": "cfg.sub",
    "getattr(cfg.sub, n + g(n))": "cfg.sub",
    "vars(cfg)": "cfg",
    "dir(cfg.sub)": "cfg.sub",
    "setattr(cfg, n, 3)": "cfg",
    "getattr(n, n)": "",
    "getattr(n.m, n)": "",
    "getattr(self.m, n)": "",
    "getattr(self[0], n)": "",
    "getattr(self(), n)": "",
    "getattr(table[0], n)": "",
    "getattr(table[n], n)": "",
    "getattr(g(n), n)": "",
    "getattr(self if n else cfg, n)": "",
    "getattr(*n)": "",
    "self.__dict__": "",
    "object.__setattr__(self, n, 'a')": "",
    "object.__getattribute__(self, n)": "",
    "n.__setattr__('a', 3)": "",
    "n.__setattr__(self, 'a')": "",
    "n.__setattr__": "",
    "vars()": "",
    "copy(n)": "",
}


@pytest.mark.parametrize("expression", AROUND)
def test_of_what_attributes_are_read_by_names_that_are_made_up(expression):
    space = {}
    exec(f"def f(self, n): return {expression}", space)
    assert used_in(space["f"].__code__).around == {AROUND[expression]}


LITERAL = ("getattr(self, 'a')", "getattr(cfg.sub, 'a', None)", "self.vars", "hasattr(n, 'a')", "object.__setattr__(n, 'a', 3)",
           "object.__getattribute__(n, 'a')")  # fmt: skip


@pytest.mark.parametrize("expression", LITERAL)
def test_literal_names_are_not_made_up(expression):
    space = {}
    exec(f"def f(self, n): return {expression}", space)
    assert not used_in(space["f"].__code__).around


def test_frozen_dataclasses_name_what_they_set():
    frozen = dataclasses.make_dataclass("Frozen", ["rate", "scale"], frozen=True)
    code = frozen.__init__.__code__
    assert not used_in(code).around


SPACES = {
    "globals()['a']": False,
    "globals().get('a')": False,
    "globals().get('a', n)": False,
    "'a' in globals()": False,
    "n.__globals__['a']": False,
    "globals()[n]": True,
    "globals()['a' + n]": True,
    "globals().get('a' + n)": True,
    "globals().get(''.join(n))": True,
    "n in globals()": True,
    "{**globals()}": True,
    "n(globals)": True,
    "n.__globals__[n]": True,
    "n.f_globals": True,
}


@pytest.mark.parametrize("expression", SPACES)
def test_whether_globals_are_looked_up_by_names_that_are_made_up(expression):
    space = {}
    exec(f"def f(n): return {expression}", space)
    assert used_in(space["f"].__code__).computes is SPACES[expression]


def test_functions_that_are_imported_inside_look_up_too():
    def f(x):
        from inspect import getmembers as members

        return members(x)

    def g(x):
        from inspect import isclass as asks

        return asks(x)

    assert used_in(f.__code__).around == {""}
    assert not used_in(g.__code__).around


def test_what_goes_on_after_an_exception():
    def typed(x):
        try:
            return x.a
        except ValueError:
            return x

    def bare(x):
        try:
            return x.a
        except:  # noqa: E722
            return x

    def finds(x):
        match x:
            case complex(real=1):
                return x

    def within(x):
        with x:
            return x.a

    assert [catches(f.__code__) for f in (typed, bare, finds, within)] == [True, True, True, False]


def test_where_a_name_is_read():
    space = {}
    exec(
        "def f(x):\n"
        "    global rate\n"
        "    rate = 1\n"  # no read
        "    y = x.rate\n"
        "    def inner():\n"
        "        return y['rate'] + y.get('other')\n"
        "    return rate, inner\n",
        space,
    )
    code = space["f"].__code__
    assert sorted({*read_at(code, "rate")}) == [4, 6, 7]
    assert {*read_at(code, "y")} >= {6}
    assert read_at(code, "other") == [6]
    assert not read_at(code, "none")


def test_variables_are_globals_only():
    space = {}
    exec(
        "def f(x):\n"
        "    global made\n"
        "    made = read(x.attribute, keyword=3)['key']\n"
        "    def inner(): return [also(y) for y in x]\n"
        "    class Local: by = rate\n"
        "    return inner()",
        space,
    )
    used = used_in(space["f"].__code__)
    assert used.sets == {"made"}
    assert used.variables - {"__name__"} == {"made", "read", "also", "rate"}


def sets_at_once(self, x):
    self.h = x
    return self.h.grad


def may_set(self, x):
    if x:
        self.h = x
    return self.h.grad


def sets_in_a_loop(self, x):
    for y in x:
        self.h = y
    return self.h.grad


def may_have_raised(self, x):
    try:
        self.h = x()
    except ValueError:
        x = None
    return self.h.grad


def sets_of_another(self, x):
    self.h = x
    self = x.other
    return self.h.grad


def sets_afterwards(self, x):
    y = self.h.grad
    self.h = x
    return y


def deletes(self, x):
    self.h = x
    del self.h
    return x


def sets_of_an_argument(self, x):
    x.h = 1
    return self.h.grad


@pytest.mark.parametrize("read", [may_set, sets_in_a_loop, may_have_raised, sets_of_another, sets_afterwards, deletes,
                                  sets_of_an_argument])  # fmt: skip
def test_an_attribute_that_may_be_read_before_it_is_set(read):
    assert "h" in slight_use_in(read.__code__).rest
    assert "h" in slight_use_in(sets_at_once.__code__).sets


KEEPS = ["self.h += 1", "self.h = self.h * 2 + n", "if self.h % self.d['n'] == n.m.k: n()", "while 3 < self.h: n()",
         "if not self.h: n()", "n(self.h == 1)", "self.h()", "self.h(*n, **n)", "self.h(*n)", "n = -self.k + 1"]  # fmt: skip
HANDS_OUT = ["n(self.h)", "n = self.h", "self.k = self.h", "n.h = self.h", "n(self.h + 1)", "n = self.h or 0", "n = [self.h]",
             "n(self.h if n else 0)", "n = getattr(self, 'h')", "n = f'{self.h}'", "n = self.h.real", "n = 0 < self.h < 4",
             "n[self.h]", "h()", "n = lambda: self.h", "n(**self.h)", "n(*n, self.h)",
             "n(*n, k=self.h)", "n({**n, 1: self.h})", "n({1: self.h, 2: n, 3: n})",
             "match n:\n  case n.C(h=k): pass", "n = n in self.h"]  # fmt: skip


def compiled(text, name="f", of="self, n"):
    space = {}
    exec(f"def {name}({of}):\n  " + text.replace("\n", "\n  "), space)
    return space[name].__code__


@pytest.mark.parametrize("text", [*KEEPS, *HANDS_OUT])
def test_whether_the_value_of_an_attribute_may_get_elsewhere(text):
    assert ("h" in hands_out(compiled(text))) == (text in HANDS_OUT)


@pytest.mark.parametrize("text", ["'{0.lr} {}'.format(n)", "n.format(self)", "str.format('{}', n)", "f'{n}'.format(n)",
                                  "'{}'.format_map(n)", "(n or '{}').format(self)", "k = n; k.format(self)",
                                  "k = n or '{}'; k.format(self)"])  # fmt: skip
def test_whether_the_text_stands_there_by_which_code_formats(text):
    assert formats_any(compiled(text)) == (not text.startswith("'"))


@pytest.mark.parametrize(
    ("text", "name", "does"),
    [("return self.optimizer.groups", "groups", True), ("return self.groups", "groups", True), ("return self", "groups", False),
     ("return self.groups()", "groups", False), ("return self.groups[0]", "groups", False), ("self.n = 1", "groups", False),
     ("return getattr(self.optimizer, n)", "__getattr__", True), ("return getattr(self.optimizer, n)", "groups", False),
     ("return getattr(self.optimizer, n)[0]", "__getattr__", False), ("return n(self.optimizer)", "__getattr__", False),
     ("return getattr(n(self), n)", "__getattr__", False)],
)  # fmt: skip
def test_whether_a_method_hands_on_an_attribute(text, name, does):
    assert hands_on(compiled(text, name)) == does


@pytest.mark.parametrize(
    ("text", "does"),
    [("return super().__getattribute__(n)", True), ("return object.__getattribute__(self, n)", False),
     ("return super(n, self.x).__getattribute__(n)", False), ("return (n or super)().__getattribute__(n)", False),
     ("return getattr(super(), '__getattribute__')(n)", False), ("return (super() or n).__getattribute__(n)", False),
     ("return (lambda: super().__getattribute__(n))()", False), ("n = super().x; return n.__getattribute__(self)", False)],
)  # fmt: skip
def test_whether_attributes_are_asked_for_by_super_alone(text, does):
    space = {}
    for name in ("__getattribute__", "get"):
        exec(f"class C:\n  def {name}(self, n): {text}", space)
        assert asks_its_base(vars(space["C"])[name].__code__) == (does and name == "__getattribute__")


def test_a_text_that_a_variable_holds():
    assert not formats_any(compiled("k = '{}'\nif n: k = 'no {n}'\nreturn k.format(n)"))


@pytest.mark.parametrize(
    ("text", "own"),
    [("self.__dict__.update(n)", True), ("getattr(self, n)", True), ("n.__dict__", False),
     ("(n or self).__dict__", False), ("self = n; self.__dict__", False), ("vars(self.m)", False),
     ("self.__dict__; vars(n)", False), ("self.__dict__; lambda m: m.__dict__", False), ("self.m.__dict__", False)],
)  # fmt: skip
def test_whether_code_looks_around_its_own_object(text, own):
    assert looks_around_itself(compiled(text)) == own
