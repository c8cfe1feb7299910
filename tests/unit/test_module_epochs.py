"""Who is watched, and until when."""

import torch
from torch import nn

from phonograph.guards import module_epochs


class Listener:
    pass


def moves(layer):
    before = module_epochs.epoch
    layer.training = not layer.training
    return module_epochs.epoch > before


def test_what_is_watched_moves_the_epoch():
    layer, listeners = nn.Identity(), [Listener(), Listener()]
    for one in listeners:
        module_epochs.watch([layer], one)
    assert moves(layer)
    del listeners[0], one
    assert moves(layer)


def test_what_nobody_listens_to_does_not():
    """What lies where it was, later, would cost a replay that has nothing to do with it a full comparison."""
    layer, other, listeners = nn.Identity(), nn.Identity(), [Listener(), Listener()]
    module_epochs.watch([layer], listeners[0])
    listeners.pop(0)
    module_epochs.watch([other], listeners[0])
    assert moves(other)
    assert not moves(layer)


def test_a_watched_parameter_may_be_swapped():
    a, b = (nn.Parameter(torch.tensor([n])) for n in (1.0, 2.0))
    listener = Listener()
    module_epochs.watch([a, b], listener)
    torch.utils.swap_tensors(a, b)
    assert a.item() == 2.0


def test_who_listens_goes_on_when_others_have_gone():
    """Those that are left are counted anew with the next that listens."""
    layer, other, gone = nn.Identity(), nn.Identity(), nn.Identity()
    stays, goes, comes = Listener(), Listener(), Listener()
    module_epochs.watch([layer], stays)
    module_epochs.watch([gone], goes)
    del goes
    module_epochs.watch([other], comes)
    assert moves(layer)
    assert moves(other)
    module_epochs.leave(comes)
    module_epochs.watch([gone], stays)
    assert moves(gone)
    assert not moves(other)
