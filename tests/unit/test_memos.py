"""Functions wrapped in a cache, found wherever they are."""

import functools
import gc
import weakref

import pytest
import torch

from phonograph.python.identity import identity
from phonograph.python.memos import Memos, kept_tensors

_CODE = """
import torch
def table(n): return torch.arange(n)
"""


def of_package():
    space = {}
    exec(compile(_CODE, "/usr/lib/site-packages/tables.py", "exec"), space)
    return space["table"]


@pytest.mark.parametrize("maxsize", [None, 1, 8])
def test_what_a_cache_keeps(maxsize):
    memo = functools.lru_cache(maxsize)(lambda n: [{"a": (torch.ones(n),)}, n])
    assert kept_tensors(memo) == []
    (table,) = memo(2)[0]["a"]
    assert [t is table for t in kept_tensors(memo)] == [True]
    memo.cache_clear()
    assert kept_tensors(memo) == []


def test_new_ones_are_found_and_those_that_have_gone_are_not():
    memos = Memos()
    before = set(memos.of_packages())
    for _ in range(3):
        function = of_package()
        memo = functools.lru_cache(function)
        table = memo(3)
        assert set(memos.of_packages()) - before == {identity(function.__code__)}
        assert memos.keeper(lambda t, table=table: t is table) is memo
        del memo
        gc.collect()
        assert memos.keeper(lambda t, table=table: t is table) is None


def test_they_are_listed_only_where_there_are_new_ones(monkeypatch):
    memos, listed = Memos(), []
    memos.of_packages()
    monkeypatch.setattr(gc, "get_objects", lambda: listed.append(1) or [])
    memos.of_packages()
    memos.keeper(lambda t: False)
    assert listed == []
    memo = functools.lru_cache(of_package())
    memos.of_packages()
    assert listed == [1]
    del memo


def test_no_other_code_has_the_identity_of_that_of_a_function_which_has_gone():
    memos, function = Memos(), of_package()
    memo, code = functools.lru_cache(function), weakref.ref(function.__code__)
    named = identity(function.__code__)
    assert named in memos.of_packages()
    del memo, function
    gc.collect()
    assert named in memos._codes
    assert code() is not None, "its identity is still asked for"


def test_functions_of_torchs_and_of_the_users_are_left_out():
    memos = Memos()
    before = set(memos.of_packages())
    mine = functools.lru_cache(lambda n: torch.ones(n))
    assert set(memos.of_packages()) == before
    del mine
