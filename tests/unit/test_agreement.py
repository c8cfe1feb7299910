"""Ranks say once what they have, and see whether others have something else."""

import pytest
import torch

from phonograph._torch import process_groups as torch_process_groups
from phonograph.distributed import agreement


class Store(dict):
    """One that ranks write to."""

    asked = 0

    def set(self, key, value):
        self[key] = value

    def get(self, key):
        return self[key]

    def check(self, keys):
        return all(key in self for key in keys)

    def add(self, key, amount):
        self.asked += 1
        self[key] = self.get(key) + amount if key in self else amount
        return self[key]


@pytest.fixture
def speak(monkeypatch):
    """What a rank of two finds when it captures for the first time."""
    store, now = Store(), []
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch_process_groups, "default_store", lambda: store)
    monkeypatch.setattr(torch_process_groups, "own_rank", lambda: now[-1])
    monkeypatch.setattr(agreement, "_PATIENCE", 0.01)

    def said(rank, mine, again=False):
        now.append(rank)
        if not again:
            agreement.forget()
        return agreement.unlike(mine)

    said.store = store
    yield said
    agreement.forget()


def test_who_is_alike_finds_nothing_and_asks_no_more(speak):
    assert speak(0, {"NCCL": "1"}) == ""
    assert speak(1, {"NCCL": "1"}) == ""
    asked = speak.store.asked
    assert speak(1, {"NCCL": "1"}, again=True) == ""
    assert speak.store.asked == asked


def test_who_is_otherwise_is_named(speak):
    assert speak(0, {"torch": "2", "NCCL": "1"}) == ""  # nobody else has spoken
    assert speak(1, {"torch": "2", "NCCL": "3"}) == "rank 0 has NCCL 1, this one 3"


def test_who_comes_late_is_seen_later(speak):
    assert speak(0, {"NCCL": "1"}) == ""
    speak.store["phonograph/alike/1"] = '{"NCCL": "2"}'
    speak.store.add("phonograph/alike/all", 1)
    assert speak(0, {"NCCL": "1"}, again=True) == "rank 1 has NCCL 2, this one 1"


def test_what_is_said_are_releases_and_nccls_settings_for_graphs(monkeypatch):
    monkeypatch.delenv("NCCL_GRAPH_MIXING_SUPPORT", raising=False)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    own = agreement.own((2, 28, 9))
    assert (own["NCCL"], own["NCCL_GRAPH_REGISTER"], own["NCCL_GRAPH_MIXING_SUPPORT"]) == ("2.28.9", "0", "not set")
    assert own["torch"] == torch.__version__
