"""Who is watched: modules and parameters, while they are there."""

import torch
from torch import nn

from phonograph.guards import module_epochs


def test_what_is_watched_moves_the_epoch():
    layer = nn.Identity()
    module_epochs.watch([layer])
    before = module_epochs.epoch
    layer.training = False
    assert module_epochs.epoch > before


def test_what_lies_where_a_watched_module_was_does_not():
    """A replay would be compared in full after each step of a model that is none of its business."""
    module_epochs.watch([nn.Identity() for _ in range(100)])
    before = module_epochs.epoch
    for other in [nn.Identity() for _ in range(100)]:
        other.training = False
    assert module_epochs.epoch == before


def test_what_lies_where_a_watched_parameter_was_does_not():
    module_epochs.watch([nn.Parameter(torch.zeros(1)) for _ in range(100)])
    before = module_epochs.epoch
    for other in [nn.Parameter(torch.zeros(1)) for _ in range(100)]:
        other.requires_grad_(False)
    assert module_epochs.epoch == before
