"""Who tells us that a tensor's memory was handed out under another version, by `Tensor.data`: whoever writes it there moves no
version of the tensor's own.

So where a recording relies on versions, `Tensor.data` is a property that leaves a note for the storages in question. It is
there only as long as such a recording is: without one, the attribute is torch's own.
"""

from __future__ import annotations

import torch

from .._torch.dynamic import Private
from .._torch.dynamo import not_compiled_by_itself
from .._torch.tensors import TensorBase, alias, has_memory, is_ordinary, storage_id
from .attribute_epochs import Door
from .replaced import stands_for

__all__ = ["data", "handed_out"]

_inherited: Private = TensorBase.data
_handed_out: dict[int, int] = {}


def handed_out(storage: int) -> int:
    """How often the memory of this storage was handed out so, since somebody has asked for it."""
    return _handed_out.setdefault(storage, 0)


def _get(t: torch.Tensor) -> torch.Tensor:
    found = alias(t)
    if is_ordinary(t) and has_memory(t) and (key := storage_id(t)) in _handed_out:
        _handed_out[key] += 1
    return found


_attribute = property(_get, _inherited.__set__, None, _inherited.__doc__)
stands_for(_attribute)


def _hang() -> None:
    if "data" not in vars(torch.Tensor):
        not_compiled_by_itself(_get.__code__)
        torch.Tensor.data = _attribute  # type: ignore[assignment]


def _take_away() -> None:
    _handed_out.clear()
    if vars(torch.Tensor).get("data") is _attribute:
        del torch.Tensor.data


data = Door(_hang, _take_away)
