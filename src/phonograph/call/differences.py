"""How a call differs from another one, by their signatures: for reasons, `explain` and the log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

from ..values.pytree_nodes import Node
from ..values.pytree_paths import parting, path_to
from ..values.wording import Naming
from .signature import Call, setting_names

__all__ = ["differing", "nearest", "told"]

Key: TypeAlias = tuple[Any, ...]

_METADATA = ("dtype", "device", "shape", "stride", "requires_grad", "is_leaf", "is_inference", "alignment")
_LONG = 40  # characters of a value
_SHOWN = (bool, int, str, bytes, type(None))  # values whose text is short, and runs no code of the user's


def differing(key: Key, call: Call) -> list[int] | None:
    """The places of the leaves that are not those of a call with that key; None where the structure is another."""
    (shape, leaves, *_), (shape_now, leaves_now, *_) = key, call.key
    if shape != shape_now or len(leaves) != len(leaves_now):
        return None
    return [i for i, (was, now) in enumerate(zip(leaves, leaves_now, strict=True)) if was != now]


def nearest(keys: Iterable[Key], call: Call) -> Key | None:
    """That of other calls' keys which differs least from this one's."""

    def distance(key: Key) -> tuple[bool, int]:
        places = differing(key, call)
        return places is None, len(places or ())

    return min((key for key in keys if key != call.key), key=distance, default=None)


def told(key: Key, call: Call, naming: Naming) -> str:
    """How a call differs from one with that key: "`x` is float32[8, 3], and was float32[4, 3]"."""
    places = differing(key, call)
    if places is None:
        return _of_arguments(key[0], call.shape) or _of_structure(key[0], call.shape, naming)
    if places:
        i = places[0]
        more = f", and {len(places) - 1} more" if len(places) > 1 else ""
        return f"`{naming(path_to(call.shape, i))}` {_of_leaf(key[1][i], call.key[1][i])}{more}"
    if key[2] != call.key[2]:
        return "its arguments share memory in another way"
    return _of_modes(key[3], call.key[3])


def _of_arguments(was: Node | None, now: Node | None) -> str:
    """(Positional arguments and those by name are the two children of the whole.)"""
    if was is not None and now is not None:
        (some, named), (some_now, named_now) = was.children, now.children
        for named_one, named_two, way in ((named_now, named, "is given"), (named, named_now, "is not given")):
            only = [n for n in (named_one.names if named_one else ()) if n not in (named_two.names if named_two else ())]
            if only:
                return f"it {way} `{only[0]}` by name"
        if some is not None and some_now is not None and len(some.children) != len(some_now.children):
            return f"it is given {len(some_now.children)} positional arguments, and was given {len(some.children)}"
    return ""


def _of_structure(was: Node | None, now: Node | None, naming: Naming) -> str:
    """What of the arguments has another structure: "`request.output` has 6 items, and had 5"."""
    way, one, other = parting(was, now)
    if len(way) <= 1:  # all arguments by place, or by name
        return "its arguments have another structure"
    if one is None or other is None or one.kind is not other.kind:
        return f"`{naming(way)}` is {_kind(other)}, and was {_kind(one)}"
    if len(one.children) != len(other.children):
        return f"`{naming(way)}` has {len(other.children)} items, and had {len(one.children)}"
    return f"`{naming(way)}` has other keys or attributes"


def _kind(node: Node | None) -> str:
    return "a single value" if node is None else f"a {node.kind.__name__}"


def _of_leaf(was: Any, now: Any) -> str:
    if _is_tensor(was) and _is_tensor(now):
        if _brief(was) != _brief(now):
            return f"is {_brief(now)}, and was {_brief(was)}"
        for name, a, b in zip(_METADATA, was, now, strict=False):
            if a != b:
                return f"has {name} {b}, and had {a}"
        return "is another parameter"
    if _has_text(was) and _has_text(now):
        return f"is {_text(now)}, and was {_text(was)}"
    return "is another value"


def _is_tensor(key: Any) -> bool:
    return type(key) is tuple and bool(key) and isinstance(key[0], torch.dtype)


def _brief(key: Any) -> str:
    return f"{str(key[0]).removeprefix('torch.')}{list(key[2])}"


def _has_text(key: Any) -> bool:
    return type(key) is tuple and len(key) == 2 and (key[0] is float or key[0] in _SHOWN)


def _text(key: Any) -> str:
    text = repr(float.fromhex(key[1]) if key[0] is float else key[1])
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."


def _of_modes(was: Any, now: Any) -> str:
    for name, a, b in zip(setting_names(), was[0], now[0], strict=False):
        if a != b:
            return f"{name} is {b}, and was {a}"
    return "autocast is set in another way" if was[1] != now[1] else "a setting of torch's is another"
