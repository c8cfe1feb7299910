"""C3, C6: leaf tensors as arguments that have, or get, a gradient: functional training, latents, images that are optimised."""

import pytest
import torch

import phonograph as pg
from phonograph.testing import Pair, assert_same
from tests.helpers import assert_replays, counts, may_run_live, plain, ramp, side_by_side


def leaf(device, *shape):
    return ramp(device, *shape).requires_grad_()


def _loss(w, x):
    loss = ((x @ w) ** 2).mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("clear", ["never", "to none", "to zero"])
@pytest.mark.parametrize("hold", [False, True], ids=["dropped", "held"])
def test_c06_a_leaf_that_comes_in_each_call_gets_eagers_gradient(device, clear, hold):
    both = plain(_loss)
    w, kept = Pair.of(leaf(device, 3, 2)), []
    for n in range(10):
        both(w, ramp(device, 4, 3) + n)
        if hold:
            kept.append(w.each(lambda t: (t.grad, t.grad.clone())))
        if clear == "to none":
            w.each(lambda t: setattr(t, "grad", None))
        elif clear == "to zero":
            w.each(lambda t: t.grad.zero_())
    w.check()
    if hold and clear == "to none":
        for pair in kept:
            pair.each(lambda held: assert_same(*held))
    assert counts(both)[2] >= 5, pg.explain(both.recorded)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_c06_functional_training(device, inside):
    def update(w, x):
        loss = ((x @ w) ** 2).mean()
        loss.backward()
        if inside:
            with torch.no_grad():
                w -= 0.1 * w.grad
                w.grad = None
        return loss.detach()

    both = plain(update)
    w = Pair.of(leaf(device, 3, 2))
    for n in range(10):
        both(w, ramp(device, 4, 3) + n)
        if not inside:

            def step(t):
                with torch.no_grad():
                    t -= 0.1 * t.grad
                t.grad = None

            w.each(step)
        w.check()
    assert counts(both)[2] >= 6, pg.explain(both.recorded)


def test_c06_an_image_that_is_made_anew_in_each_step(device):
    """As in DeepDream: the gradient is one more result."""

    def dream(image):
        image.sin().sum().backward()
        return image.grad.norm()

    both = plain(dream)
    image, grads = Pair.of(leaf(device, 4)), []
    for _ in range(8):
        both(image)
        grads.append(image.each(lambda t: (t.grad, t.grad.clone())))
        image = image.each(lambda t: (t.detach() + 0.1 * t.grad).requires_grad_())
        image.check()
    for pair in grads:
        pair.each(lambda held: assert_same(*held))  # each is the caller's
    assert counts(both) == (1, 1, 7), pg.explain(both.recorded)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_c06_latents_that_an_optimizer_has(device, kind):
    def make():
        latent = leaf(device, 3)
        make_optimizer = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "adam": torch.optim.Adam}[kind]
        optimizer = make_optimizer([latent])

        def step(latent, target):
            optimizer.zero_grad()
            loss = (latent.sin() - target).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        latents.append(latent)
        return step, optimizer

    latents = []
    both = side_by_side(make)
    latent = Pair(latents[1], latents[0])
    for n in range(10):
        both(latent, ramp(device, 3) + n)
        latent.check()
    assert counts(both)[2] >= 6, pg.explain(both.recorded)


def test_c06_many_leaves_in_an_object(device):
    """As in Gaussian splatting: an object with its leaves, whose gradients are read outside."""

    class Scene:
        def __init__(self):
            self.means, self.scales = leaf(device, 5, 2), leaf(device, 5)
            self.background = 0.5

    def render(scene, view):
        image = ((scene.means @ view) * scale(scene)).sum() + scene.background
        image.backward()
        return image.detach()

    def scale(scene):
        return scene.scales.exp()

    both = plain(render)
    scene = Pair.of(Scene())
    for n in range(10):
        both(scene, ramp(device, 2) + n)

        def step(s):
            with torch.no_grad():
                for t in (s.means, s.scales):
                    t -= 0.01 * t.grad
                    t.grad = None

        scene.each(step)
        scene.each(vars).check()
    assert counts(both)[2] >= 5, pg.explain(both.recorded)


@pytest.mark.parametrize("where", ["argument", "dictionary"])
def test_c06_hooks_of_a_leaf_are_called_in_each_call(device, where):

    def step(w, x):
        w = w["w"] if where == "dictionary" else w
        (w * x).sum().backward()

    both = plain(step)
    w = Pair.of(leaf(device, 3))
    w.recorded.register_hook(lambda g: g * 2)
    w.live.register_hook(lambda g: g * 2)
    given = Pair({"w": w.recorded}, {"w": w.live}) if where == "dictionary" else w
    for n in range(6):
        both(given, ramp(device, 3) + n)
    w.check()


def test_c06_two_leaves_by_turns(device):
    both = plain(_loss)
    ws = [Pair.of(leaf(device, 3, 2)) for _ in range(2)]
    for n in range(12):
        both(ws[n % 2], ramp(device, 4, 3) + n)
    for w in ws:
        w.check()
    assert_replays(both, ws[0], ramp(device, 4, 3))


@may_run_live
def test_c18_leaves_that_never_come_again_run_live_in_the_end(device):
    recorded = pg.record(_loss)
    for n in range(80):
        w, v = leaf(device, 3, 2), leaf(device, 3, 2)
        w.grad, v.grad = torch.ones_like(w), torch.ones_like(v)
        x = ramp(device, 4, 3) + n
        assert_same(recorded(w, x), _loss(v, x))
        assert_same(w.grad, v.grad)


def test_c06_a_gradient_is_there_only_where_the_call_leaves_one(device):
    def f(w, x, scale):
        y = (w * x).sum() * scale
        if scale > 1:
            y.backward()
        return y.detach()

    both = plain(f)
    for n in range(8):
        w = Pair.of(leaf(device, 3))
        both(w, ramp(device, 3) + n, 1 + n % 2)
        assert (w.recorded.grad is None) == (w.live.grad is None) == (n % 2 == 0)
    assert counts(both)[2] == 6


@may_run_live
@pytest.mark.parametrize("first", ["leaf", "history"])
def test_c06_a_gradient_goes_on_into_the_history_of_an_argument(device, first):
    """It is no gradient of the argument's own, as that of a leaf is. A signature of one is none of the other."""
    w, u = leaf(device, 3), leaf(device, 3)
    f = pg.record(lambda y: (w * y).sum().backward())
    for n in range(12):
        w.grad = u.grad = None
        given = leaf(device, 3) if (first == "leaf") == (n % 8 < 4) else u * (n + 1)
        f(given)
        assert_same(w.grad, given.detach())
        if given.is_leaf:
            assert_same(given.grad, w.detach())
            assert u.grad is None
        else:
            assert_same(u.grad, w.detach() * (n + 1))


def forces(weight, x):
    """As potentials of atoms do with positions."""
    x.requires_grad_()
    (force,) = torch.autograd.grad((x @ weight).tanh().sum(), x)
    return -force


def trained_by_forces(weight, x):
    x.requires_grad = True
    energy = (x @ weight).tanh().sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    (force.square().sum() + energy).backward()  # which leaves a gradient in the argument, too
    return energy.detach()


def gives_it(weight, x):
    return x.requires_grad_()


def gives_what_shares_its_memory(weight, x):
    return x.requires_grad_().detach(), x.sum().detach()


def writes_it_before(weight, x):
    x.mul_(2).requires_grad_()
    return torch.autograd.grad((x @ weight).tanh().sum(), x)[0]


def gives_what_has_a_history(weight, x):
    return x.requires_grad_() * 2


@may_run_live
@pytest.mark.parametrize("function", [forces, trained_by_forces, gives_it, gives_what_shares_its_memory, writes_it_before,
                                      gives_what_has_a_history])  # fmt: skip
def test_c03_an_argument_that_the_call_lets_require_a_gradient(device, function):
    """So does the caller's from then on."""
    weight = ramp(device, 3, 2).requires_grad_()
    both = side_by_side(lambda: lambda x: function(weight, x))
    for n in range(8):
        given = Pair.of(ramp(device, 4, 3) + n)
        both(given)
        given.check()
        assert given.recorded.requires_grad
        assert given.recorded.is_leaf
        given.each(lambda t: (t * 2).sum().backward())  # it is the caller's
        given.check()
    assert counts(both)[2] >= 6 or function is gives_what_has_a_history, pg.explain(both.recorded)
