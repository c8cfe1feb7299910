"""What "the same" means: values, and what shares memory with what.

Tensors are compared by dtype, shape, stride, device, layout, class, `requires_grad`, whether there is a `grad_fn`, and
*bits*: NaN payloads and the sign of zero count. Python values are compared by type and by `==` (floats by their bits).
Containers, dataclasses, modules (parameters, gradients, buffers, attributes), optimizers and generators are compared
through. Two results that look alike may still be different things, so the *aliasing* can be compared as well: which
tensors of a structure are one object, and which overlap in memory.

The public names are those of `phonograph.testing`.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import struct
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import torch

from ._torch.dynamic import Thing
from .values.tensor_subclasses import consists_of_parts, parts

__all__ = ["aliasing", "assert_same", "assert_same_aliasing", "tensors_in"]


# ---------------------------------------------------------------------------------------------------
# The same value


def assert_same(actual: object, expected: object, where: str = "value", *, tolerance: float = 0.0) -> None:
    """Assert that two values are the same in everything that can be seen but their identity.

    Tensors: class, dtype, shape, stride, device, layout, `requires_grad`, presence of a `grad_fn`, and
    every bit. Python values: type and `==`, floats by their bits. Containers, dataclasses, modules,
    optimizers, generators and exceptions are compared part by part. Functions and iterators are not
    compared: two copies of one program hold different ones. An optimizer's step counts are compared as
    numbers, wherever they are kept.

    Args:
        actual: what phonograph gave.
        expected: what plain PyTorch gave.
        where: the path that a failure names, such as `result[0]['loss']`.
        tolerance: 0 compares bits; otherwise floating-point tensors may differ by this much, relative
            and absolute. For arithmetic that is known to be rounded differently.

    Raises:
        AssertionError: naming the first part that differs, and how.
    """
    _assert_same(actual, expected, _Place(where, tolerance))


class _Place(NamedTuple):
    """Where in a structure the comparison is, and how exact it is."""

    path: str
    tolerance: float

    def __str__(self) -> str:
        return self.path

    def at(self, part: str) -> _Place:
        return self._replace(path=self.path + part)


def _assert_same(actual: object, expected: object, where: _Place) -> None:
    assert type(actual) is type(expected), (
        f"{where}: a {type(actual).__qualname__}, live gives a {type(expected).__qualname__}"
        f"\n  phonograph: {actual!r}\n  live:       {expected!r}"
    )
    for kind, compare in _COMPARISONS:
        if isinstance(actual, kind):
            compare(actual, expected, where)
            return
    _assert_same_object(actual, expected, where)


def _equal(actual: object, expected: object, where: _Place | str) -> None:
    assert actual == expected, f"{where}: {actual!r}, live gives {expected!r}"


def _assert_same_tensor(actual: torch.Tensor, expected: torch.Tensor, where: _Place) -> None:
    for name in ("dtype", "shape", "device", "layout", "requires_grad", "is_leaf"):
        _equal(getattr(actual, name), getattr(expected, name), where.at(f".{name}"))
    _equal(actual.is_inference(), expected.is_inference(), where.at(".is_inference()"))
    if expected.is_leaf:
        _assert_same(actual.grad, expected.grad, where.at(".grad"))
    _equal(actual.grad_fn is None, expected.grad_fn is None, where.at(".grad_fn is None"))
    if consists_of_parts(expected):
        for i, (one, other) in enumerate(zip(parts(actual), parts(expected), strict=True)):
            _assert_same(one.detach(), other.detach(), where.at(f"'s part {i}"))
        _equal(_made_of(actual), _made_of(expected), where.at("'s description"))
        return
    if actual.layout is not torch.strided:
        actual, expected = actual.to_dense(), expected.to_dense()
    _equal(actual.stride(), expected.stride(), where.at(".stride()"))
    assert _same_values(actual, expected, where.tolerance), (
        f"{where}: values differ\n  phonograph: {_excerpt(actual)}\n  live:       {_excerpt(expected)}"
    )


def _made_of(tensor: Thing) -> str:
    return repr(tensor.__tensor_flatten__())


def _same_values(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    if actual.device.type == "meta":
        return True
    if tolerance and (actual.is_floating_point() or actual.is_complex()):
        return torch.allclose(actual.detach(), expected.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
    return torch.equal(_bits(actual), _bits(expected))


_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers: there NaN equals itself and 0.0 differs from -0.0."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.contiguous().view(_INTEGER_OF_SIZE[plain.element_size()])


def _excerpt(tensor: torch.Tensor) -> str:
    values = tensor.detach().flatten()[:8].tolist()
    return f"{values}{' …' if tensor.numel() > 8 else ''}"


def _assert_same_mapping(actual: Mapping[Thing, object], expected: Mapping[Thing, object], where: _Place) -> None:
    _equal(list(actual), list(expected), where.at(": keys in order"))
    for key in expected:
        _assert_same(actual[key], expected[key], where.at(f"[{key!r}]"))


def _assert_same_sequence(actual: Sequence[object], expected: Sequence[object], where: _Place) -> None:
    _equal(len(actual), len(expected), f"len({where})")
    if {*map(type, actual), *map(type, expected)} == {int} and actual == expected:
        return  # states of generators are hundreds of them
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        _assert_same(one, other, where.at(f"[{i}]"))


def _assert_same_float(actual: float, expected: float, where: _Place) -> None:
    same = struct.pack("d", actual) == struct.pack("d", expected)
    assert same, f"{where}: {actual!r}, live gives {expected!r}"


def _assert_same_module(actual: torch.nn.Module, expected: torch.nn.Module, where: _Place) -> None:
    for name in ("named_parameters", "named_buffers"):
        tensors, wanted = dict(getattr(actual, name)()), dict(getattr(expected, name)())
        _assert_same_mapping(tensors, wanted, where.at(f".{name}()"))
    for (name, part), (_, other_part) in zip(actual.named_modules(), expected.named_modules(), strict=True):
        _assert_same_mapping(_plain_values(part), _plain_values(other_part), where.at(f".{name or 'self'}.__dict__"))


def _plain_values(module: torch.nn.Module) -> dict[str, object]:
    """The module's own attributes: not torch's bookkeeping, and not what only a process can compare."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and not callable(value) and not isinstance(value, torch.nn.Module)
    }


def _assert_same_optimizer(actual: torch.optim.Optimizer, expected: torch.optim.Optimizer, where: _Place) -> None:
    _assert_same(_optimizer_values(actual), _optimizer_values(expected), where.at(".state_dict()"))


def _optimizer_values(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    values = optimizer.state_dict()
    states = {i: {name: _count_or_value(name, v) for name, v in state.items()} for i, state in values["state"].items()}
    return {**values, "state": states}


def _count_or_value(name: str, value: Thing) -> object:
    return float(value) if name == "step" else value


def _assert_same_generator(actual: torch.Generator, expected: torch.Generator, where: _Place) -> None:
    _assert_same(actual.get_state(), expected.get_state(), where.at(".get_state()"))


def _assert_same_exception(actual: BaseException, expected: BaseException, where: _Place) -> None:
    _equal(str(actual), str(expected), f"str({where})")
    _assert_same(actual.args, expected.args, where.at(".args"))


def _assert_same_object(actual: Thing, expected: Thing, where: _Place) -> None:
    """By the class's own `==` where it has one, through `__dict__` otherwise; iterators and the like not at all."""
    if dataclasses.is_dataclass(expected) and not isinstance(expected, type):
        for field in dataclasses.fields(expected):
            _assert_same(getattr(actual, field.name), getattr(expected, field.name), where.at(f".{field.name}"))
    elif isinstance(expected, _NAMESPACES) or (hasattr(expected, "__dict__") and not _defines_equality(type(expected))):
        _assert_same(vars(actual), vars(expected), where.at(".__dict__"))
    elif hasattr(expected, "__array__"):  # NumPy's == answers for each element
        _equal((actual.dtype, actual.tolist()), (expected.dtype, expected.tolist()), where)
    elif _defines_equality(type(expected)):
        _equal(actual, expected, where)


_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)  # whose == is that of their attributes


def _defines_equality(kind: type) -> bool:
    return any("__eq__" in vars(base) for base in kind.__mro__[:-1])


def _nothing_to_compare(actual: object, expected: object, where: _Place) -> None:
    """For functions and modules of code."""


# In order: the first class that fits decides. Enums before numbers and strings, which they may also be.
_COMPARISONS: tuple[tuple[type | tuple[type, ...], Callable[[Thing, Thing, _Place], None]], ...] = (
    (torch.Tensor, _assert_same_tensor),
    (torch.nn.Module, _assert_same_module),
    (torch.optim.Optimizer, _assert_same_optimizer),
    (torch.Generator, _assert_same_generator),
    (BaseException, _assert_same_exception),
    ((enum.Enum, str, bytes, type(None), bool, int, type), _equal),
    ((torch.dtype, torch.layout, torch.memory_format), _equal),
    (float, _assert_same_float),
    (Mapping, _assert_same_mapping),
    ((list, tuple, deque), _assert_same_sequence),
    (AbstractSet, _equal),
    ((types.FunctionType, types.MethodType, types.ModuleType), _nothing_to_compare),
)


# ---------------------------------------------------------------------------------------------------
# The same aliasing


def assert_same_aliasing(actual: object, expected: object) -> None:
    """Assert that the tensors in two equal structures are shared alike.

    Args:
        actual: a nested structure of tensors, for instance `(arguments, result, state)` of a recorded call.
        expected: the same structure of the live call.

    Raises:
        AssertionError: where two places hold one object, or overlap in memory, on one side only.
    """
    here, live = aliasing(actual), aliasing(expected)
    assert not here - live, f"with phonograph and not live: {min(here - live)}"
    assert not live - here, f"live and not with phonograph: {min(live - here)}"


def aliasing(value: object) -> set[str]:
    """What the tensors in a nested structure share, as sentences: `['x'] and ['y'][0] overlap in memory`."""
    places = list(tensors_in(value))
    tensors = [tensor for _, tensor in places]
    found: set[str] = set()
    for what, pairs in (
        ("are one object", _identical_pairs(tensors)),
        ("overlap in memory", _overlapping_pairs(tensors)),
    ):
        found |= {f"{places[i][0]} and {places[j][0]} {what}" for i, j in pairs if i != j}
    return found


def _identical_pairs(tensors: Sequence[torch.Tensor]) -> set[tuple[int, int]]:
    first: dict[int, int] = {}
    return {(first.setdefault(id(t), i), i) for i, t in enumerate(tensors)}


def _overlapping_pairs(tensors: Sequence[torch.Tensor]) -> set[tuple[int, int]]:
    """Pairs whose address ranges meet (interleaved views count as meeting), found in order of address."""
    ranges = sorted((str(t.device), *_address_range(t), i) for i, t in enumerate(tensors))
    found: set[tuple[int, int]] = set()
    for at, (device, _, end, i) in enumerate(ranges):
        for other_device, start, _, j in ranges[at + 1 :]:
            if (other_device, start) >= (device, end):
                break
            found.add((min(i, j), max(i, j)))
    return found


def tensors_in(value: object, where: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a nested structure, each occurrence with its path, in a fixed order."""
    if isinstance(value, torch.Tensor) and consists_of_parts(value):
        yield from ((f"{where}'s part {i}", part) for i, part in enumerate(parts(value)))
    elif isinstance(value, torch.Tensor):
        yield where, value
    elif isinstance(value, torch.nn.Module):
        yield from tensors_in(dict(value.named_parameters()) | dict(value.named_buffers()), where)
    elif isinstance(value, torch.optim.Optimizer):
        yield from tensors_in(list(value.state.values()), where)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple, deque)):
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{where}[{i}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name), f"{where}.{field.name}")


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.layout is not torch.strided or not tensor.numel() or tensor.device.type == "meta":
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
