"""Random programs, recorded and live side by side (see `programs.py`).

PHONOGRAPH_FUZZ_PROGRAMS programs (300) from seed PHONOGRAPH_FUZZ_SEED (0); `python -m tests.fuzz.run` runs more.
"""

import random

import pytest
import torch

from tests.fuzz.drawing import by_hypothesis
from tests.fuzz.programs import (
    Call,
    Change,
    Fresh,
    Function,
    Held,
    Instruction,
    KeepGradient,
    Mutate,
    Program,
    check,
    make_program,
    run,
    shrink,
)


@by_hypothesis(make_program, "PHONOGRAPH_FUZZ_PROGRAMS", 300)
def test_random_programs_do_what_eager_does(device, program):
    check(program, device)


# What has gone wrong once, or would be a pity if the generator stopped making it.

double = Function((Instruction("add", 0, 0),))

CORPUS = {
    "feedback": Program((double,), (Call(0, (Held(0),), hold=(0,)),) * 8),
    "feedback that writes its input": Program(
        (Function((Instruction("write a", 0, 2), Instruction("add", 0, 0))),), (Call(0, (Held(0),), hold=(0,)),) * 8
    ),
    "two functions in turn, all held": Program(
        (double, Function((Instruction("tanh", 0),))), (Call(0, hold=(0,)), Call(1, (Held(0),), hold=(0,))) * 5
    ),
    "an owner that writes its result": Program((double,), (Call(0, hold=(0,)), Mutate(0), Call(0, (Held(0),))) * 4),
    "inference and back": Program(
        (double,), (Call(0, mode="inference", hold=(0,)), Call(0, (Held(0),), mode="no_grad", hold=(0,))) * 4
    ),
    "a weight replaced, transposed and changed": Program(
        (Function((Instruction("matmul", 0),)),),
        tuple(
            action
            for what in ("in place", "matrix.data", "matrix transposed", "in place", "assign", "in place")
            for action in (Call(0), Call(0), Call(0), Change(what))
        ),
    ),
    "one, true and one point zero": Program((double,), tuple(Call(0, scalar=s) for s in (1, True, 1.0) * 4)),
    "an expanded input that is written": Program(
        (Function((Instruction("halve a", 0),)),), (Call(0, (Fresh((2, 4), "f32", "expanded"),)),) * 4
    ),
    "gradients that somebody keeps": Program(
        (Function((Instruction("backward", 0), Instruction("descend", 0, k=1))),), (Call(0), KeepGradient()) * 5
    ),
    "gradients accumulated and kept": Program(
        (Function((Instruction("backward", 0), Instruction("descend", 0, k=3))),),
        (Call(0), Call(0), KeepGradient(), Call(0), Change("gradient to none")) * 3,
    ),
    "descending on the gradient of the call before": Program(
        (Function((Instruction("descend", 0, k=1), Instruction("backward", 0))),), (Call(0),) * 6, seed=66
    ),
    "whole steps": Program((Function((Instruction("gradient step", 0),)),), (Call(0, hold=(0,)),) * 7),
}  # fmt: skip


@pytest.mark.parametrize("program", CORPUS.values(), ids=CORPUS)
def test_programs_worth_keeping(device, program):
    check(program, device)


# The fuzzer itself


def test_programs_are_data():
    program = CORPUS["a weight replaced, transposed and changed"]
    assert eval(repr(program)) == program


def test_a_good_part_of_random_programs_is_replayed(device):
    ran = [check(make_program(random.Random(n).choice), device) for n in range(20)]
    assert sum(r.replayed for r in ran) > 40
    assert sum(r.replayed > 0 for r in ran) >= 10


def test_running_twice_gives_the_same_trace():
    program = make_program(random.Random(5).choice)
    one, other = (run(program, False, torch.device("cpu")) for _ in range(2))
    assert [action for action, _ in one.trace] == [action for action, _ in other.trace]


def test_shrinking_keeps_what_matters():
    program = make_program(random.Random(3).choice)
    program = Program(program.functions, (*program.actions, Mutate(0), *program.actions))
    small = shrink(program, lambda p: any(isinstance(a, Mutate) for a in p.actions))
    assert small.actions == (Mutate(small.actions[0].back),)
    assert all(not f.instructions for f in small.functions)
