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


def wraps(memos, function):
    return memos.wraps(function.__code__, function.__globals__)


def test_new_ones_are_found_and_those_that_have_gone_are_not():
    memos = Memos()
    for _ in range(3):
        function = of_package()
        assert not wraps(memos, function)
        memo = functools.lru_cache(function)
        table = memo(3)
        assert wraps(memos, function)
        assert memos.keeper(lambda t, table=table: t is table) is memo
        del memo
        gc.collect()
        assert memos.keeper(lambda t, table=table: t is table) is None


def test_they_are_listed_only_where_there_are_new_ones_and_for_code_that_may_be_of_one(monkeypatch):
    memos, listed, function = Memos(), [], of_package()
    monkeypatch.setattr(gc, "get_referrers", lambda kind: listed.append(kind) or [])
    assert not wraps(memos, test_what_a_cache_keeps)
    assert not wraps(memos, torch.nn.Linear.forward)
    assert listed == []
    for _ in range(2):
        wraps(memos, function)
        memos.keeper(lambda t: False)
    assert len(listed) == 1
    memo = functools.lru_cache(function)
    wraps(memos, function)
    assert len(listed) == 2
    del memo


def test_no_other_code_has_the_identity_of_that_of_a_function_which_has_gone():
    memos, function = Memos(), of_package()
    memo, code = functools.lru_cache(function), weakref.ref(function.__code__)
    named = identity(function.__code__)
    assert wraps(memos, function)
    del memo, function
    gc.collect()
    assert named in memos._codes
    assert code() is not None, "its identity is still asked for"


def test_functions_of_torchs_and_of_the_users_are_left_out():
    memos = Memos()
    mine = functools.lru_cache(lambda n: torch.ones(n))
    assert not wraps(memos, mine.__wrapped__)
    space = {"torch": torch}
    exec(compile("def table(n): return torch.arange(n)", torch.__file__, "exec"), space)
    torchs = functools.lru_cache(space["table"])
    assert not wraps(memos, torchs.__wrapped__)
