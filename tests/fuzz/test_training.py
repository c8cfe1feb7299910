"""Random training loops around recorded models, beside the same with live ones (see `training.py`).

PHONOGRAPH_FUZZ_TRAINING programs (60) from seed PHONOGRAPH_FUZZ_SEED (0); `python -m tests.fuzz.run --training` runs more.
"""

import dataclasses
import random

import pytest
import torch

from phonograph.testing import assert_same
from tests.fuzz import training
from tests.fuzz.drawing import by_hypothesis
from tests.fuzz.training import (
    Backward,
    Change,
    Clip,
    Copy,
    Forward,
    Freeze,
    Fresh,
    Hook,
    KeepGradient,
    Model,
    Output,
    Reset,
    Same,
    Step,
    Training,
    WriteOutput,
    ZeroGrad,
    check,
    make_program,
    run,
    shrink,
)


@by_hypothesis(make_program, "PHONOGRAPH_FUZZ_TRAINING", 60)
def test_random_training_loops_do_what_eager_does(device, program):
    check(program, device)


# What has gone wrong once, or would be a pity if the generator stopped making it.

PERCEPTRON = Model(("linear", "tanh", "dropout", "linear"))
LEARN = (ZeroGrad(), Forward(), Backward(), Clip(), Step())

CORPUS = {
    "an ordinary loop": Training((PERCEPTRON,), LEARN * 6, optimizer="adamw", record_step=True),
    "an optimizer over a frozen parameter whose gradient goes": Training(
        (Model(("scale",)),),
        (Forward(), Backward(), Freeze(), Step(), Step(), ZeroGrad(), Step(), Step()),
        record_step=True,
    ),
    "a recomputed part through which nothing flows": Training(
        (Model(("linear", "embedding"), recompute="reentrant"),), (Forward(0, Fresh(grad=True)), Backward()) * 4
    ),
    "three in flight, in any order": Training(
        (PERCEPTRON,), (*(Forward(),) * 3, Backward((1,)), Backward((2,)), Backward((0,)), Step(), ZeroGrad(False)) * 6
    ),
    "a chain, half of which is detached": Training(
        (PERCEPTRON, Model(("norm", "shared"), "residual"), Model(("shared", "batch"), "both", "plain")),
        (Forward(), Forward(1, Output()), Backward(retain=True), Forward(2, Output(0, True)), Backward(), Backward((2,))) * 6,
    ),
    "a model that is applied to its own result": Training(
        (PERCEPTRON,), (Forward(), Forward(0, Output()), Backward((0,), "sum"), Step()) * 6
    ),
    "the same input again": Training(
        (PERCEPTRON, Model(("scale", "relu"))), (Forward(0, Fresh(grad=True)), Forward(1, Same()), Backward((0, 1))) * 6
    ),
    "a result that is written": Training((PERCEPTRON,), (Forward(), WriteOutput(grad=True), Backward(), Step()) * 6),
    "a saved result that is written": Training(
        (Model(("tanh",)),), (Forward(0, Fresh(grad=True)), WriteOutput(), Backward()) * 5
    ),
    "weights that move while a backward waits": Training(
        (Model(("scale", "tanh")),), (Forward(0, Fresh(grad=True)), Change("data"), Backward()) * 6
    ),
    "hooks, and gradients that are kept": Training(
        (PERCEPTRON,), (Hook(0), Hook(1, "added"), Hook(2, "count"), *(*LEARN, KeepGradient(), KeepGradient(3)) * 6)
    ),
    "hooks of weights that get no gradient": Training(
        (Model(("linear", "linear"), "both"),),
        (Forward(), Backward((0,)), Hook(2, "added"), *(Forward(), Backward((1,)), Forward(), Backward((0, 1))) * 6),
    ),
    "a copy takes the model's place": Training((PERCEPTRON,), (*LEARN * 4, Copy(), *LEARN * 4, Reset(), *LEARN * 4)),
}  # fmt: skip


@pytest.mark.parametrize("scarce", [False, True], ids=["roomy", "scarce"])
@pytest.mark.parametrize("program", CORPUS.values(), ids=CORPUS)
def test_programs_worth_keeping(device, program, scarce):
    check(dataclasses.replace(program, scarce=scarce), device)


# The fuzzer itself


def test_programs_are_data():
    program = make_program(random.Random(1).choice)
    assert eval(repr(program), vars(training)) == program


def test_a_good_part_of_random_programs_is_replayed(device):
    ran = [check(make_program(random.Random(n).choice), device) for n in range(30)]
    assert sum(r.forwards for r in ran) > 120
    assert sum(r.backwards > 0 for r in ran) >= 6


def test_running_twice_gives_the_same_trace():
    program = make_program(random.Random(5).choice)
    one, other = (run(program, torch.device("cpu")) for _ in range(2))
    assert_same(one.trace, other.trace)


def test_shrinking_keeps_what_matters():
    program = make_program(random.Random(3).choice)
    program = dataclasses.replace(program, actions=(*program.actions, Copy(1), *program.actions))
    small = shrink(program, lambda p: any(isinstance(a, Copy) for a in p.actions))
    assert small == Training((Model((small.models[0].layers[0],)),), (Copy(),), seed=program.seed)
