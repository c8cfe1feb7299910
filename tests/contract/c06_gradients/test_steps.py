"""C6 inside whole steps: gradients, zeroed, accumulated, hooked, clipped."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import phonograph as pg
from phonograph.testing import Pair, assert_same
from tests.contract.shared.whole_steps import batch, steps, train
from tests.helpers import counts, may_run_live, side_by_side


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("where", ["before", "after"])
def test_c06_zero_grad_either_way_at_either_end(device, set_to_none, where):
    def step_of(model, optimizer):
        def step(x, y):
            if where == "before":
                optimizer.zero_grad(set_to_none=set_to_none)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if where == "after":
                optimizer.zero_grad(set_to_none=set_to_none)
            return loss.detach()

        return step

    both = steps(device, "momentum", step_of=step_of)
    for _ in range(8):
        both(*batch(device))
    assert counts(both)[2] >= 5


@pytest.mark.parametrize("k", [2, 4])
def test_c06_accumulation_over_micro_batches_within_the_step(device, k):
    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            losses = []
            for xs, ys in zip(x.chunk(k), y.chunk(k), strict=True):
                loss = F.cross_entropy(model(xs), ys) / k
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            return torch.stack(losses).sum()

        return step

    both = steps(device, "adamw, fused", step_of=step_of, hold=True)
    for _ in range(7):
        both(*batch(device, 8))


def backward_only(model, optimizer):
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    return step


def test_c06_gradients_accumulate_over_calls(device):
    """Nobody zeroes them in the recorded function: the first call makes them, the others add."""
    both = steps(device, step_of=backward_only)
    for _ in range(8):
        both(*batch(device))
    assert counts(both)[2] >= 4


@may_run_live
@pytest.mark.parametrize("set_to_none", [True, False])
def test_c06_the_optimizer_steps_on_the_gradients_of_the_call_before(device, set_to_none):
    def step_of(model, optimizer):
        def step(x, y):
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        return step

    both = steps(device, "momentum", step_of=step_of)
    for _ in range(8):
        both(*batch(device))


@may_run_live
@pytest.mark.parametrize("set_to_none", [True, False])
def test_c06_the_caller_zeroes_the_gradients_between_calls(device, set_to_none):
    both = steps(device, step_of=backward_only)
    for n in range(12):
        both(*batch(device))
        if n % 2:
            both.change(lambda state: (state[1].step(), state[1].zero_grad(set_to_none=set_to_none)))


def test_c06_the_caller_clips_replaces_and_removes_gradients(device):
    both = steps(device, step_of=backward_only)

    def replace(state):
        state[0].first.weight.grad = torch.ones(4, 4, device=device)

    for change in [
        lambda state: None,
        lambda state: None,
        lambda state: nn.utils.clip_grad_norm_(state[0].parameters(), 0.1),
        replace,
        lambda state: state[0].second.bias.grad.mul_(3),
        lambda state: setattr(state[0].second.weight, "grad", None),
        lambda state: None,
        replace,
        lambda state: None,
    ]:
        both(*batch(device))
        both.change(change)
    both(*batch(device))


@may_run_live
def test_c06_gradients_that_the_caller_keeps(device):
    """References to p.grad after a step, and clones: eager replaces p.grad where it was None, and adds where not."""
    both = steps(device)
    kept = []
    for n in range(10):
        both(*batch(device))
        pair = Pair(both.state[0].first.weight.grad, both.live_state[0].first.weight.grad)
        kept.append((pair, pair.each(torch.clone)))
        for held, value in kept:
            held.check(f"gradient kept from step {n}")
            value.check()


def test_c06_gradients_of_unused_parameters_stay_none(device):
    both = steps(device, "adamw, fused")
    for _ in range(6):
        both(*batch(device))
        assert both.state[0].unused.weight.grad is None
        assert both.state[0].unused.weight not in both.state[1].state


def test_c06_a_shared_parameter_gets_the_sum(device):
    def make():
        embedding = nn.Embedding(6, 4, device=device)
        head = nn.Linear(4, 6, bias=False, device=device)
        head.weight = embedding.weight
        model = nn.Sequential(embedding, head)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(tokens):
            optimizer.zero_grad()
            # A look-up by matrix product: the backward of an embedding is not deterministic on CUDA.
            hidden = torch.eye(6, device=device)[tokens] @ embedding.weight
            loss = F.cross_entropy(head(hidden), tokens.roll(1))
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, [model, optimizer]

    both = side_by_side(make)
    for _ in range(6):
        both(torch.randint(0, 6, (7,), device=device))
    assert both.state[0][0].weight is both.state[0][1].weight


def clip_gradient(parameter):
    parameter.grad.clamp_(-0.01, 0.01)


def test_c06_hooks_on_tensors_parameters_and_modules(device):
    def step_of(model, optimizer):
        model.first.weight.register_hook(lambda grad: grad * 0.5)
        model.second.weight.register_post_accumulate_grad_hook(clip_gradient)
        model.first.register_forward_hook(lambda module, inputs, output: output + 0.1)
        model.second.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
        model.second.register_full_backward_hook(lambda module, gi, go: (gi[0] * 3,))

        def step(x, y):
            optimizer.zero_grad()
            hidden = model(x)
            hidden.register_hook(lambda grad: grad.clamp(-0.2, 0.2))
            loss = F.cross_entropy(hidden, y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    both = steps(device, "momentum", step_of=step_of)
    for _ in range(7):
        both(*batch(device))
    assert counts(both)[2] >= 4


@may_run_live
def test_c06_hooks_that_come_and_go_between_steps(device):
    both = steps(device)
    handles = []
    for n in range(12):
        if n == 4:
            both.change(lambda state: handles.append(state[0].first.weight.register_hook(lambda grad: grad * 10)))
        if n == 8:
            for handle in handles:
                handle.remove()
        both(*batch(device))


@may_run_live
def test_c06_a_hook_that_counts_runs_once_a_step(device):
    def make():
        (step, (model, optimizer)), calls = train(device)(), []
        model.first.weight.register_hook(lambda grad: calls.append(grad.norm()))
        return step, [model, optimizer, calls]

    both = side_by_side(make)
    for n in range(1, 7):
        both(*batch(device))
        assert len(both.state[2]) == n


def test_c06_gradient_clipping_within_the_step(device):
    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            return loss.detach(), norm

        return step

    both = steps(device, "adamw, fused", step_of=step_of, hold=True)
    for _ in range(7):
        both(*batch(device))


def test_c06_dropout_and_batch_norm_in_a_step(device):
    both = steps(device, "momentum", dropout=0.5, norm=True)
    for n in range(1, 9):
        both(*batch(device))
        assert both.state[0].norm.num_batches_tracked.item() == n
    assert counts(both)[2] >= 5


def test_c06_training_and_evaluation_in_turn(device):
    both = steps(device, "momentum", dropout=0.5, norm=True)
    model = both.state[0]
    evaluate = pg.record(lambda x: model(x), warmup=1)
    for _ in range(10):
        both(*batch(device))
        both.change(lambda state: state[0].eval())
        x = torch.randn(3, 4, device=device)
        with torch.no_grad():
            assert_same(evaluate(x), both.live_state[0](x))
        both.change(lambda state: state[0].train())


def test_c06_two_forwards_before_their_backwards(device):
    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            one, other = F.cross_entropy(model(x), y), model(x * 2).square().mean()
            other.backward()
            one.backward()
            optimizer.step()
            return one.detach(), other.detach()

        return step

    both = steps(device, step_of=step_of)
    for _ in range(7):
        both(*batch(device))


def test_c06_retain_graph_and_several_backwards(device):
    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            hidden = model(x)
            F.cross_entropy(hidden, y).backward(retain_graph=True)
            hidden.square().mean().backward()
            optimizer.step()
            return hidden.detach()

        return step

    both = steps(device, step_of=step_of, hold=True)
    for _ in range(7):
        both(*batch(device))


def test_c06_autograd_grad_within_the_step(device):
    def step_of(model, optimizer):
        parameters = [*model.first.parameters(), *model.second.parameters()]

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for p, g in zip(parameters, gradients, strict=True):
                    p.sub_(g, alpha=0.1)
            return loss.detach(), gradients[0]

        return step

    both = steps(device, step_of=step_of, hold=True)
    for _ in range(7):
        both(*batch(device))


@may_run_live
def test_c06_a_gradient_penalty_within_the_step(device):
    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            x = x.detach().requires_grad_()
            loss = F.cross_entropy(model(x), y)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()
            optimizer.step()
            return loss.detach(), slope.detach()

        return step

    both = steps(device, step_of=step_of)
    for _ in range(7):
        both(*batch(device))


@may_run_live
def test_c06_an_argument_that_requires_grad_gets_its_gradient(device):
    def step_of(model, optimizer):
        def step(x, y):
            F.cross_entropy(model(x), y).backward()

        return step

    both = steps(device, step_of=step_of)
    for _ in range(6):
        x, y = batch(device)
        given = Pair.of(x.requires_grad_())
        both(given, y)
        given.each(lambda t: t.grad).check("gradient of the argument")


@pytest.mark.parametrize("reentrant", [False, True])
def test_c06_recompute_within_the_step(device, reentrant):
    from torch.utils.checkpoint import checkpoint

    def step_of(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            hidden = checkpoint(lambda h: model.dropout(torch.tanh(h)), model.first(x), use_reentrant=reentrant)
            loss = F.cross_entropy(model.second(hidden), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    both = steps(device, dropout=0.5, step_of=step_of)
    for _ in range(7):
        both(*batch(device))
    assert counts(both)[2] > 3, pg.explain(both.recorded)
