"""C11: what holds the same in each replay is made once more beside a capture, as it was made."""

from contextlib import nullcontext

import torch

from phonograph._torch.tensors import storage_id
from phonograph.devices.cuda.fixed_values import Recipes

CPU = torch.device("cpu")
aten = torch.ops.aten


class Call:
    """Operators of a call, each noted."""

    def __init__(self, *outside):
        self.made = []
        there = {storage_id(t): t for t in outside}
        self.recipes = Recipes(CPU, nullcontext, self._number, there.get)

    def _number(self, key):
        return next((i for i, t in enumerate(self.made) if storage_id(t) == key), None)

    def __call__(self, func, *args, **kwargs):
        out = func(*args, **kwargs)
        if self._number(storage_id(out)) is None:
            self.made.append(out)
        self.noted = self.recipes.note(func, args, kwargs, out)
        return out


def test_c11_values_are_what_they_were_made_to_be_at_the_time_of_the_question():
    held = torch.tensor([5.0, 6.0, 7.0])
    call = Call(held)
    a = call(aten.arange.default, 3, dtype=torch.float32)
    b = call(aten.add.Tensor, a, held)
    call(aten.mul_.Tensor, a[1:], 3)
    like = call(aten.full_like.default, torch.randn(3), 2.0)
    assert call.recipes.value(a).tolist() == [0.0, 3.0, 6.0]
    assert call.recipes.value(b[1:]).tolist() == [7.0, 9.0]
    assert call.recipes.value(like).tolist() == [2.0, 2.0, 2.0]
    assert call.recipes.result(aten.equal.default, (a, b), {}) is False
    assert call.recipes.result(aten.nonzero.default, (a,), {}).tolist() == [[1], [2]]
    assert held.tolist() == [5.0, 6.0, 7.0]


def test_c11_what_is_outside_is_not_written_again():
    held = torch.zeros(2)
    call = Call(held)
    call(aten.add_.Tensor, held, 1)
    assert not call.noted
    a = call(aten.ones.default, [2])
    torch._foreach_add_([a, held], 1)
    assert not call.recipes.note(aten._foreach_add_.Scalar, ([a, held], 1), {}, None)
    assert held.tolist() == [2.0, 2.0]
    assert not call.recipes.note(aten.conj.default, (torch.ones(2) * 1j,), {}, (torch.ones(2) * 1j).conj())
