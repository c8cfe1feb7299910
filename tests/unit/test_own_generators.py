"""Generators of compiled code's own, on any machine: calls that are live and calls that are replayed, in any order, draw in
their backwards what they have drawn in their forwards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phonograph._torch.dynamo import kept_of_generators, number_of_call
from phonograph.state.compiled_generators import OwnGenerators, own_of


@pytest.fixture(autouse=True, scope="module")
def nothing_is_captured() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", bool)
        yield


class Generator:
    """As torch's on CUDA."""

    device = torch.device("cuda", 0)

    def __init__(self, seed: int) -> None:
        self.seed, self.offset = seed, 0

    def initial_seed(self) -> int:
        return self.seed

    def manual_seed(self, seed: int) -> None:
        self.seed, self.offset = seed, 0

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset

    def get_state(self) -> Any:
        return self.seed, self.offset

    def set_state(self, state: Any) -> None:
        self.seed, self.offset = state

    def draw(self, n: int) -> tuple[int, int]:
        began = self.seed, self.offset
        self.offset += n
        return began


def compiled() -> type:
    """A function as AOTAutograd makes it, with two pairs of generators. The bookkeeping is that of torch 2.11."""
    fwd_rng_states, bwd_rng_states = ([Generator(n) for n in (3, 7)] for _ in range(2))
    curr_fwd_iter = itertools.count(0)
    backward_state_position = 0
    pending_forwards: set[int] = set()
    saved_backward_tensor_states: dict[int, Any] = {}

    class CompiledFunction:
        compiled_fw = compiled_bw = staticmethod(lambda generators: [g.draw(4 * n + 4) for n, g in enumerate(generators)])

        @staticmethod
        def forward(ctx: Any) -> Any:
            ctx._curr_iter = next(curr_fwd_iter)
            if ctx._curr_iter != backward_state_position:
                saved_backward_tensor_states[ctx._curr_iter] = [g.get_state() for g in fwd_rng_states]
            pending_forwards.add(ctx._curr_iter)
            return CompiledFunction.compiled_fw(fwd_rng_states)

        @staticmethod
        def backward(ctx: Any, retains: bool) -> Any:
            nonlocal backward_state_position
            now, position = ctx._curr_iter, backward_state_position
            waits = position in pending_forwards and position not in saved_backward_tensor_states
            if waits and (position != now or retains):
                saved_backward_tensor_states[position] = [g.get_state() for g in bwd_rng_states]
            if now in saved_backward_tensor_states:
                if position != now:
                    for g, saved in zip(bwd_rng_states, saved_backward_tensor_states[now], strict=True):
                        g.set_state(saved)
                if not retains:
                    del saved_backward_tensor_states[now]
            else:
                assert position == now
            backward_state_position = now + 1
            if not retains:
                pending_forwards.remove(now)
            return CompiledFunction.compiled_bw(bwd_rng_states)

    return CompiledFunction


def node_of(function: type) -> Any:
    """A call's node in autograd's graph."""
    return type("CompiledFunctionBackward", (), {"_forward_cls": function})()


def test_what_is_kept_is_found_in_variables_of_functions() -> None:
    function = compiled()
    node = node_of(function)
    assert own_of(node) is None  # it draws nothing
    function.forward(node)  # type: ignore[attr-defined]
    own = own_of(node)
    assert own is not None
    assert [g.get_offset() for g in own.forward] == [4, 8]
    assert [g.get_offset() for g in own.backward] == [0, 0]
    assert own_of(node) is own
    assert number_of_call(node) == 0


def test_what_is_kept_is_found_in_an_object() -> None:
    rng_state = SimpleNamespace(fwd_rng_states=[1], bwd_rng_states=[2], curr_fwd_iter=itertools.count(),
                                backward_state_position=0, pending_forwards=set(),
                                saved_backward_tensor_states={})  # fmt: skip
    function = type("CompiledFunction", (), {
        "compiled_fw": None, "forward": lambda _: rng_state, "backward": lambda _: rng_state})  # fmt: skip
    assert kept_of_generators(node_of(function)) is rng_state


@pytest.mark.parametrize("lacks", ["pending_forwards", "bwd_rng_states"])
def test_what_keeps_something_else_is_not_known(lacks: str) -> None:
    names = {"fwd_rng_states", "bwd_rng_states", "curr_fwd_iter", "backward_state_position", "pending_forwards"}
    rng_state = SimpleNamespace(**dict.fromkeys({*names, "saved_backward_tensor_states"} - {lacks}))
    function = type("CompiledFunction", (), {
        "compiled_fw": None, "forward": lambda _: rng_state, "backward": lambda _: rng_state})  # fmt: skip
    assert kept_of_generators(node_of(function)) is None


STEPS = st.sampled_from(["live", "replay", "step", "backward", "retained backward", "drop"])


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(STEPS, st.integers(0, 3)), max_size=25))
def test_each_backward_draws_what_its_forward_has_drawn(steps: list[tuple[str, int]]) -> None:
    function: Any = compiled()
    first = node_of(function)
    function.backward(first, function.forward(first) is None)
    own = own_of(first)
    assert own is not None
    twin = [Generator(g.seed) for g in own.forward]  # plain eager draws by turns from one
    for g in twin:
        g.set_offset(own.forward[twin.index(g)].get_offset())
    waiting: list[tuple[Any, Any]] = []  # what identifies a call, and what it has drawn

    def replayed() -> tuple[Any, Any]:
        own.begin()
        return own.begins, function.compiled_fw(own.forward)

    for step, i in steps:
        if step in ("live", "replay", "step"):
            expected = function.compiled_fw(twin)
            if step == "live":
                node = node_of(function)
                waiting.append((node, function.forward(node)))
            else:
                waiting.append(replayed())
            assert waiting[-1][1] == expected
            if step == "step":  # forward and backward in one graph
                begins, drawn = waiting.pop()
                own.put_backward(begins)
                assert function.compiled_bw(own.backward) == drawn
        elif waiting:
            call, drawn = waiting[i % len(waiting)]
            if step != "drop":
                if isinstance(call, tuple):
                    own.put_backward(call)
                    again = function.compiled_bw(own.backward)
                else:
                    again = function.backward(call, step == "retained backward")
                assert again == drawn
            if step != "retained backward":
                del waiting[i % len(waiting)]


def test_what_waits_for_a_backward_is_forgotten_with_it() -> None:
    function: Any = compiled()
    nodes = [node_of(function) for _ in range(2)]
    for node in nodes:
        function.forward(node)
    own = own_of(nodes[0])
    assert isinstance(own, OwnGenerators)
    own.settle()
    assert own.places(0) == [(3, 0), (7, 0)]
    assert own.places(1) == [(3, 4), (7, 8)]
    own.forget(0)
    own.forget(0)
    assert own.places(0) == []
    assert own.places(1) != []
