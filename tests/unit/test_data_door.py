"""C8: whoever takes a tensor's memory by `data` is heard while somebody relies on versions."""

import torch

from phonograph._torch.tensors import storage_id
from phonograph.devices.cuda.fixed_values import Versions, Watched
from phonograph.guards.data_door import data, handed_out


class User:
    pass


def test_c08_data_is_heard_of_the_tensors_in_question_and_only_as_long_as_somebody_listens():
    user, t, other = User(), torch.ones(3), torch.zeros(3)
    data.stay_for(user)
    before = handed_out(storage_id(t))
    t.data.add_(1)
    assert t.tolist() == [2.0] * 3
    _ = other.data
    assert handed_out(storage_id(t)) == before + 1
    t.data = other
    assert t.tolist() == [0.0] * 3
    _ = torch.nn.Linear(2, 2).half().weight.data
    del user
    assert "data" not in vars(torch.Tensor)


def test_c08_memory_whose_versions_are_relied_on_is_the_same_memory(monkeypatch):
    """What gets other memory by `data` keeps its version, and may get it where the old one lay."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", bool)
    t = torch.ones(3)
    known = Versions(Watched("t", ""), [t], t.view(torch.uint8).clone())
    place = known.place("t")
    before = place.read()
    assert place.read() == before
    where = t.data_ptr()
    for n in range(50):
        t.data = torch.full((3,), float(n))
        assert t.data_ptr() != where
        assert place.read() != before
    del known, place
    assert "data" not in vars(torch.Tensor)
