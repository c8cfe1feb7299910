"""What a capture has found: the device's side of it (`Captured`) and Python's."""

from __future__ import annotations

import inspect
from collections.abc import Sequence, Set
from dataclasses import dataclass
from types import CodeType

import torch

from .._torch.dynamo import ran_compiled
from ..capture.python_events import Listener
from ..devices.base import Captured
from ..guards.attribute_effects import Left
from ..guards.hyperparameters import Dials
from ..python.executed_code import Ran
from ..python.loggers import Question
from ..python.origin import BACKWARD
from ..values.host_scalars import Reckoned
from .returned import Returned

__all__ = ["Behaviour", "CodeThatRan", "Evidence"]


@dataclass(frozen=True)
class CodeThatRan:
    """The Python code of a call."""

    functions: Sequence[tuple[CodeType, dict[str, object]]]
    """The code of all functions that started, and the globals of each."""
    known: Ran | None
    """All code that ran, if that is certain."""
    loggers: Sequence[Question]
    """What loggers were asked."""
    runs_backward: bool
    """A backward of the call's own ran."""
    sets_hooks: bool
    """Hooks may have been set on tensors or nodes of autograd's."""
    names_gradients: bool
    """The attribute `grad` is asked for, whoever's code it is."""
    compiled: bool
    """Some of it is code that `torch.compile` has made."""

    @classmethod
    def heard(cls, listener: Listener, known: Ran | None, names: Set[str]) -> CodeThatRan:
        """As a listener has heard it. These `names` occur in the code that the function can reach."""
        codes = listener.ran
        sets_hook = inspect.unwrap(torch.Tensor.register_hook)  # `module_epochs` stands before it, and before others
        return cls(
            functions=listener.functions(),
            known=known,
            loggers=[*listener.loggers.values()],
            runs_backward=any(code.co_name == BACKWARD for code in codes),
            sets_hooks=sets_hook.__code__ in codes or any("hook" in name for name in names),
            names_gradients=any("grad" in code.co_names for code in codes),
            compiled=ran_compiled(codes),
        )


@dataclass(frozen=True)
class Behaviour:
    """What Python's side of a captured call has shown."""

    code: CodeThatRan
    tensors: tuple[torch.Tensor, ...]
    """What the function got in the place of the slots, one a slot: with a history, where the call has such."""
    copied_sets: frozenset[int]
    """The identities of the sets that stood for those among the arguments."""
    returned: Returned
    """The result, taken apart."""
    numbers: tuple[int, ...]
    """Leaves of the result that are numbers, to be read."""
    reckoned: Reckoned | None
    """What is worked out of them."""
    left: Left
    """What the call leaves in attributes and containers. It is not there any more; tensors among it are in the result."""


@dataclass(frozen=True)
class Evidence:
    """All that a capture has found."""

    captured: Captured
    behaviour: Behaviour
    dials: Dials
    """The hyper-parameters and other numbers that were followed."""
