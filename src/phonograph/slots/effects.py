"""What a call leaves in attributes and containers, and each replay leaves there as well (`guards/attribute_effects.py`):
counts, plain values; tensors and numbers, which are results that nobody is given; changes of containers among the arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .._torch.dynamic import Leaves, Thing
from ..call.signature import Call
from ..guards.attribute_effects import APPENDED, Left
from ..guards.attribute_epochs import states
from ..guards.carried_state import put
from ..guards.snapshot import Setting
from ..python.introspection import own_dict
from ..values.container_edits import Edit
from .column import Broken, Column, Step, Tensors

__all__ = ["Effects"]


class Effects(Column):
    """Those of one recording."""

    def __init__(
        self, left: Left, settings: tuple[Setting, ...] = (), edits: tuple[Edit, ...] = (),
        gained: tuple[int, ...] = (), turned: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """`settings` are plain values that are set, `edits` changes of containers among the arguments, `gained` the numbers of
        arguments that get a gradient, and `turned` of those that require one from then on."""
        self.left, self.settings, self.edits, self.gained, self.turned = left, settings, edits, gained, turned
        self._counted = False  # after this run
        self.takes_results = bool(left.puts or edits or gained or turned)
        """Whether some results are left somewhere."""

    def fill(self) -> Sequence[Step]:
        return [self._begin] if self.left.counts else []

    def _begin(self) -> None:
        self._counted = False

    def leave(self) -> Sequence[Step]:
        return [self._set] if self.left.counts or self.settings else []

    def _set(self) -> None:
        if not self._counted:
            for count in self.left.counts:
                own = own_dict(count.of)
                assert own is not None
                own[count.name] += count.by
            self._counted = True
        for one in self.settings:
            one.spot.put(one.new)

    def break_off(self, run: Broken) -> None:
        if run.shows:
            self._set()

    def leave_results(self, made: Thing, tensors: Tensors, call: Call | None) -> object:
        """The result of a call. For each kind of what is left somewhere, what was `made` is (the rest, [that])."""
        gradients: Leaves = []
        edited: Leaves = []
        values: Leaves = []
        if self.gained:
            made, gradients = made
        if self.edits:
            made, edited = made
        if self.left.puts:
            made, values = made
        for one, value in zip(self.left.puts, values, strict=True):
            if one.name is APPENDED:
                one.of.append(value)
            else:
                put(one.of, one.name, value)
        if self.left.behind:
            states.opened()
        for i in self.turned:
            tensors[i].requires_grad_()
        for i, gradient in zip(self.gained, gradients, strict=True):
            tensors[i].grad = gradient
        for edit, new in zip(self.edits, edited, strict=True):
            assert call is not None
            edit.repeat(call.containers[edit.number], new)
        return made

    @property
    def paths(self) -> list[str]:
        """The names of what is set."""
        return [*self.left.paths, *(one.path for one in self.settings)]

    def explain(self) -> Iterator[str]:
        for path in self.paths:
            yield f"sets {path}"
