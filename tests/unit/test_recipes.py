"""C11: what holds the same in each replay is made once more beside a capture, as it was made."""

from contextlib import nullcontext

import torch

from phonograph._torch.tensors import storage_id
from phonograph.capture.recipes import Recipes

CPU = torch.device("cpu")
aten = torch.ops.aten


class Call:
    """Operators of a call, each noted."""

    def __init__(self, *outside):
        self.made = []
        self.recipes, self._there = Recipes(CPU, nullcontext), {storage_id(t): t for t in outside}

    def known(self, key):
        return self._there.get(key, next((i for i, t in enumerate(self.made) if storage_id(t) == key), None))

    def value(self, t):
        return self.recipes.value(t, self.known).tolist()

    def __call__(self, func, *args, **kwargs):
        out = func(*args, **kwargs)
        if self.known(storage_id(out)) is None:
            self.made.append(out)
        self.noted = self.recipes.note(func, args, kwargs, out, self.known)
        return out


def test_c11_values_are_what_they_were_made_to_be_at_the_time_of_the_question():
    held = torch.tensor([5.0, 6.0, 7.0])
    call = Call(held)
    a = call(aten.arange.default, 3, dtype=torch.float32)
    b = call(aten.add.Tensor, a, held)
    call(aten.mul_.Tensor, a[1:], 3)
    like = call(aten.full_like.default, torch.randn(3), 2.0)
    assert call.value(a) == [0.0, 3.0, 6.0]
    assert call.value(b[1:]) == [7.0, 9.0]
    assert call.value(like) == [2.0, 2.0, 2.0]
    assert call.recipes.result(aten.equal.default, (a, b), {}, call.known) is False
    assert call.recipes.result(aten.nonzero.default, (a,), {}, call.known).tolist() == [[1], [2]]
    assert held.tolist() == [5.0, 6.0, 7.0]


def test_c11_what_is_outside_is_not_written_again():
    held = torch.zeros(2)
    call = Call(held)
    call(aten.add_.Tensor, held, 1)
    assert not call.noted
    a = call(aten.ones.default, [2])
    torch._foreach_add_([a, held], 1)
    assert not call.recipes.note(aten._foreach_add_.Scalar, ([a, held], 1), {}, None, call.known)
    assert held.tolist() == [2.0, 2.0]
    assert not call.recipes.note(aten.conj.default, (torch.ones(2) * 1j,), {}, (torch.ones(2) * 1j).conj(), call.known)
