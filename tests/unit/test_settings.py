"""A replay is as quick to see that no setting has changed as it is bound to see that one has."""

import functools
import sys
from contextlib import contextmanager

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from phonograph._torch import settings as torch_settings
from phonograph.call import signature

_OTHER = {
    bool: lambda now: not now, int: lambda now: now + 1, str: lambda now: "medium", torch.dtype: lambda now: torch.float64
}  # fmt: skip


def _settable():
    return [(get, put, _OTHER[type(get())]) for get, put in signature._SETTERS.items()]


@pytest.mark.parametrize(("get", "put", "other"), _settable(), ids=[get.__name__ for get, *_ in _settable()])
def test_each_setting_that_is_set(get, put, other):
    unchanged, before = signature.unchanged(), get()
    assert unchanged()
    try:
        try:
            put(other(before))
        except RuntimeError as e:
            pytest.skip(f"this machine has one way only: {e}")
        assert get() != before
        assert not unchanged()
    finally:
        put(before)
    assert unchanged()


@contextmanager
def _another_order():
    before = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(before[::-1])
    try:
        yield
    finally:
        torch._C._set_sdp_priority_order(before)


@contextmanager
def _deterministic(warn_only):
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _set_while_off(get, put, to):
    before = get()
    put(to)
    try:
        yield
    finally:
        put(before)


def _dtype_while_off(kind):
    put = functools.partial(torch.set_autocast_dtype, kind)
    return lambda: _set_while_off(functools.partial(torch.get_autocast_dtype, kind), put, torch.float32)


_CONTEXTS = {
    **{f"{kind} dtype while off": _dtype_while_off(kind) for kind in ("cpu", "cuda")},
    "cache while off": lambda: _set_while_off(
        torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, not torch.is_autocast_cache_enabled()
    ),
    "no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "anomaly": lambda: torch.autograd.detect_anomaly(False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16), "device": lambda: torch.device("meta"),
    "function mode": TorchFunctionMode, "dispatch mode": TorchDispatchMode, "dual level": forward_ad.dual_level,
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "order of attention": _another_order, "deterministic": lambda: _deterministic(False), "warns": lambda: _deterministic(True),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("context", _CONTEXTS.values(), ids=_CONTEXTS)
def test_each_setting_that_is_entered(context):
    unchanged, before = signature.unchanged(), signature.modes()
    with context():
        assert not unchanged()
        assert signature.modes() != before
    assert unchanged()
    assert signature.modes() == before


def test_what_a_trace_looks_at():
    unchanged, found = signature.unchanged(), []
    torch.jit.trace(lambda x: found.append(unchanged()) or x + 1, torch.ones(1))
    assert not all(found)
    assert unchanged()


def test_where_all_has_to_be_asked(monkeypatch):
    """As in a release of torch whose settings are not found in its memory, and whose guard does not say what it looks at."""
    monkeypatch.setattr(torch_settings, "_GlobalStateGuard", None)
    monkeypatch.setattr(signature, "_in_memory", frozenset())
    unchanged = signature.unchanged()
    assert unchanged()
    for get, put, other in _settable():
        if isinstance(before := get(), bool) and get is not torch._C._get_cpu_allow_fp16_reduced_precision_reduction:
            put(other(before))
            assert not unchanged(), get
            put(before)
    with torch.autocast("cpu", torch.bfloat16):
        assert not unchanged()
    assert unchanged()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch's library has other names")
def test_settings_are_found_in_memory():
    memory, names = torch_settings.kept_settings()
    assert names == torch_settings._KEPT.keys()
    assert len(memory.raw) < 1 << 10
    for name in names:  # each has a byte of its own there
        before, now = memory.raw, getattr(torch._C, name)()
        dict(signature._SETTERS)[getattr(torch._C, name)](not now)
        changed = [i for i, (a, b) in enumerate(zip(before, memory.raw, strict=True)) if a != b]
        dict(signature._SETTERS)[getattr(torch._C, name)](now)
        assert len(changed) == 1, name
        assert memory.raw == before
