"""C1, C2, C6, C8: recurrent layers, whose weights torch hands to cuDNN in one piece, and their dropout, which cuDNN draws from
states of its own.

Each program runs twice from equal seeds, plain and recorded. What it logs is the same to the bit."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import may_run_live

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*RNN module weights are not part of single contiguous chunk"),
    pytest.mark.filterwarnings("ignore:.*LSTM with projections is not supported with oneDNN"),
]

KINDS = {
    "lstm": lambda **kw: nn.LSTM(6, 8, **kw),
    "gru": lambda **kw: nn.GRU(6, 8, **kw),
    "rnn": lambda **kw: nn.RNN(6, 8, nonlinearity="relu", **kw),
    "lstm, two layers": lambda **kw: nn.LSTM(6, 8, num_layers=2, **kw),
    "gru, both ways": lambda **kw: nn.GRU(6, 8, num_layers=2, bidirectional=True, **kw),
    "lstm, projected": lambda **kw: nn.LSTM(6, 8, proj_size=4, num_layers=2, **kw),
    "gru, without bias": lambda **kw: nn.GRU(6, 8, bias=False, **kw),
    "lstm, wide": lambda **kw: nn.LSTM(6, 256, **kw),
}
kinds = pytest.mark.parametrize("kind", KINDS)
ways = pytest.mark.parametrize("way", ["step", "module"])
dropping = pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])


class Net(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn, self.drop = rnn, nn.Dropout(0.2)
        self.head = nn.LazyLinear(2)

    def forward(self, x, hidden=None):
        out, hidden = self.rnn(self.drop(x), hidden)
        return self.head(self.drop(out)), hidden


def _copied(x):
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    return copy.deepcopy(x.state_dict()) if hasattr(x, "state_dict") else [*map(_copied, x)]


class Run:
    """One of the two: `record` does so, or nothing; what is logged is copied."""

    def __init__(self, program, device, on):
        torch.manual_seed(5)
        self.device, self.on, self.logged, self.recorded = device, on, [], []
        program(self)
        self.log(torch.rand(3, device=device))

    def record(self, function, **options):
        if not self.on:
            return function
        self.recorded.append(pg.record(function, **options))
        return self.recorded[-1]

    def log(self, *values):
        self.logged.append([_copied(x) for x in values])

    def net(self, rnn):
        net = Net(rnn).to(self.device)
        net(self.batch())
        return net

    def batch(self, n=4, length=5):
        return torch.randn(length, n, 6).to(self.device)


def same_as_plain(program, device):
    plain, recorded = Run(program, device, False), Run(program, device, True)
    assert_same(recorded.logged, plain.logged)
    return recorded.recorded


def training(run, net, way="step", **options):
    """A step, recorded whole or its model; it takes a batch, and hands on hidden states without their history."""
    opt = torch.optim.AdamW(net.parameters(), lr=0.01)
    model = run.record(net, **options) if way == "module" else net

    def step(x, hidden=None):
        opt.zero_grad()
        out, hidden = model(x, hidden)
        loss = out.square().mean()
        loss.backward()
        opt.step()
        hidden = hidden.detach() if isinstance(hidden, torch.Tensor) else tuple(h.detach() for h in hidden)
        return loss.detach(), hidden

    return run.record(step, **options) if way == "step" else step


def replayed(found, calls):
    (recorded,) = found
    assert pg.stats(recorded).replayed >= calls, pg.explain(recorded)


@kinds
@ways
def test_c01_c06_recurrent_layers_are_trained(device, kind, way):
    def program(run):
        net = run.net(KINDS[kind]())
        step = training(run, net, way)
        for n in range(10):
            with torch.no_grad():
                net.rnn.weight_hh_l0.mul_(1 + n / 100)  # what lies in the weights counts, and not where it was copied to once
            run.log(*step(run.batch()))
        run.log(net, [p.grad for p in net.parameters()])

    replayed(same_as_plain(program, device), 7)


@kinds
def test_c01_recurrent_layers_are_evaluated(device, kind):
    def program(run):
        net = run.net(KINDS[kind]()).eval()
        f = run.record(torch.no_grad()(lambda x: net(x)))
        for _ in range(6):
            run.log(f(run.batch()))

    replayed(same_as_plain(program, device), 4)


@dropping
@ways
def test_c02_their_dropout_is_drawn_as_live(device, kind, way):
    """Live calls of it, of another network, and evaluations come between."""

    def program(run):
        net, other = (run.net(kind(6, 8, num_layers=3, dropout=0.4)) for _ in range(2))
        step = training(run, net, way)
        for n in range(16):
            run.log(*step(run.batch()))
            if n % 4 == 1:
                run.log(other(run.batch())[0], net.rnn(run.batch())[0])
            if n % 5 == 2:
                run.log(net.eval()(run.batch())[0])
                net.train()
        run.log(net)

    replayed(same_as_plain(program, device), 11)


@pytest.mark.parametrize("seeding", ["seed", "state", "fork"])
@ways
def test_c02_their_dropout_begins_anew_once_the_generator_was_seeded(device, seeding, way):
    def program(run):
        net = run.net(nn.LSTM(6, 8, num_layers=2, dropout=0.4))
        step = training(run, net, way)
        for n in range(24):
            if n in (6, 12, 13, 18):
                if seeding == "seed":
                    torch.manual_seed(n)
                elif seeding == "state":
                    generator = (
                        torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
                    )
                    generator.set_state(generator.get_state())
                else:
                    with torch.random.fork_rng([device] if device.type == "cuda" else []):
                        torch.rand(2, device=device)
            run.log(*step(run.batch()))

    (recorded,) = same_as_plain(program, device)
    assert pg.stats(recorded).replayed >= 24 - 6, pg.explain(recorded)
    assert pg.stats(recorded).recorded <= 2, pg.explain(recorded)


@may_run_live
def test_c02_seeded_before_each_call(device):
    def program(run):
        net = run.net(nn.LSTM(6, 8, num_layers=2, dropout=0.4))
        step = training(run, net)
        for n in range(16):
            x = run.batch()
            torch.manual_seed(n % 3)
            run.log(*step(x))

    (recorded,) = same_as_plain(program, device)
    assert pg.stats(recorded).calls == 16


def test_c02_an_evaluation_beside_dropout(device):
    """torch hands the states to each network, whether it draws or not."""

    def program(run):
        first, net = run.net(nn.LSTM(6, 8, num_layers=2, dropout=0.4)), run.net(nn.GRU(6, 8))
        run.log(first(run.batch())[0])
        step = training(run, net, "module")
        for n in range(8):
            run.log(*step(run.batch()))
            if n == 4:
                torch.manual_seed(3)

    replayed(same_as_plain(program, device), 6)


@ways
def test_c01_hidden_states_go_on(device, way):
    def program(run):
        net = run.net(nn.LSTM(6, 8, num_layers=2, dropout=0.2))
        step, hidden = training(run, net, way), None
        hidden = tuple(torch.zeros(2, 4, 8, device=device) for _ in range(2))
        for _ in range(12):
            loss, hidden = step(run.batch(), hidden)
            run.log(loss, hidden)
        run.log(net)

    replayed(same_as_plain(program, device), 9)


@may_run_live
@ways
def test_c08_their_weights_lie_elsewhere(device, way):
    def program(run):
        net = run.net(nn.GRU(6, 8, num_layers=2))
        step = training(run, net, way)
        for n in range(24):
            if n == 6:
                net.rnn.flatten_parameters()
            if n == 12:
                net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
            if n == 18:
                net.rnn.weight_ih_l0.data = net.rnn.weight_ih_l0.data.clone()  # in no piece with the others
            run.log(*step(run.batch()))
        run.log(net)

    (recorded,) = same_as_plain(program, device)
    assert pg.stats(recorded).replayed >= 10, pg.explain(recorded)


@may_run_live
def test_c08_a_forward_that_flattens(device):
    class Flattening(Net):
        def forward(self, x, hidden=None):
            self.rnn.flatten_parameters()
            return super().forward(x, hidden)

    def program(run):
        net = run.net(nn.LSTM(6, 8))
        net.__class__ = Flattening
        step = training(run, net)
        for _ in range(5):
            run.log(*step(run.batch()))

    same_as_plain(program, device)


@may_run_live
def test_c11_packed_sequences(device):
    def program(run):
        net = run.net(nn.LSTM(6, 8))

        def f(x, lengths):
            out, _ = net.rnn(pack_padded_sequence(x, lengths))
            return pad_packed_sequence(out)[0].detach()

        f = run.record(f)
        for n in range(5):
            run.log(f(run.batch(), torch.tensor([5, 4, 2 + n % 2, 1])))

    same_as_plain(program, device)


LENGTHS = [[5, 4, 3, 2], [5, 5, 2, 2], [5, 3, 3, 3]]  # as many in all, and as many in the first batch
layers = pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])


@may_run_live
@layers
@pytest.mark.parametrize("fallback", ["live", "auto"])
@pytest.mark.parametrize("where", ["packed inside", "packed outside", "padded again", "torch.ops"])
def test_c11_packed_sequences_that_differ_in_the_sizes_of_batches_only(device, kind, fallback, where):
    """Torch reads these on the host, by no operator."""

    def program(run):
        rnn = KINDS[kind]().to(run.device)
        hidden = torch.zeros(1, 4, 8, device=run.device)
        state = (hidden, hidden) if kind == "lstm" else hidden

        def f(x, lengths):
            return rnn(pack_padded_sequence(x, lengths), state)[0].data.detach()

        def of_packed(data, sizes):
            if where == "torch.ops":
                operator = getattr(torch.ops.aten, "rnn_relu" if kind == "rnn" else kind).data
                given = [*state] if kind == "lstm" else state
                return operator(data, sizes, given, rnn._flat_weights, True, 1, 0.0, False, False)[0].detach()
            packed = PackedSequence(data, sizes)
            return rnn(packed, state)[0].data.detach() if where == "packed outside" else pad_packed_sequence(packed)[0] * 2

        f = run.record(f if where == "packed inside" else of_packed, fallback=fallback, keep="always")
        for n in range(18):
            x, lengths = run.batch(), torch.tensor(LENGTHS[n % 3 if n > 8 else 0])
            packed = pack_padded_sequence(x, lengths)
            run.log(f(x, lengths) if where == "packed inside" else f(packed.data, packed.batch_sizes))

    same_as_plain(program, device)


@may_run_live
@layers
@pytest.mark.parametrize("given", ["tensor", "list"])
def test_c01_packed_sequences_of_lengths_that_stay(device, kind, given):
    """They are read once, and relied on: another recording where somebody writes them."""

    def program(run):
        net, lengths = run.net(KINDS[kind]()), torch.tensor(LENGTHS[0])
        opt = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x):
            opt.zero_grad()
            out, _ = net.rnn(pack_padded_sequence(x, lengths if given == "tensor" else [5, 4, 3, 2], enforce_sorted=False))
            out = pad_packed_sequence(out)[0]
            out.square().mean().backward()
            opt.step()
            return out.detach()

        step = run.record(step, keep="always")
        for n in range(12):
            if n == 6:
                lengths.copy_(torch.tensor(LENGTHS[1]))
            run.log(step(run.batch()))
        run.log(net)

    (recorded,) = same_as_plain(program, device)
    assert pg.stats(recorded).replayed >= 9 or device.type == "cuda", pg.explain(recorded)


@ways
@pytest.mark.parametrize("drops", [0.0, 0.3])
def test_c07_under_autocast(cuda, way, drops):
    """(On the CPU, torch has no recurrent layers of this type everywhere.)"""
    device = cuda

    def program(run):
        net = run.net(nn.LSTM(6, 8, num_layers=2, dropout=drops))
        step = training(run, net, way)
        for _ in range(8):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                run.log(step(run.batch())[0])
        run.log(net)

    (recorded,) = same_as_plain(program, device)
    assert pg.stats(recorded).replayed >= 5, pg.explain(recorded)


def test_c06_their_backward_runs_twice(device):
    def program(run):
        net = run.net(nn.LSTM(6, 8, num_layers=2, dropout=0.3))
        model = run.record(net)
        for _ in range(6):
            net.zero_grad()
            loss = model(run.batch())[0].square().mean()
            loss.backward(retain_graph=True)
            run.log([p.grad for p in net.parameters()])
            loss.backward()
            run.log([p.grad for p in net.parameters()])

    replayed(same_as_plain(program, device), 4)


@may_run_live
def test_c10_verified_dropout_runs_live_on_a_gpu(device):
    def program(run):
        step = training(run, run.net(nn.LSTM(6, 8, num_layers=2, dropout=0.3)), verify=2)
        for _ in range(8):
            run.log(*step(run.batch()))

    (recorded,) = same_as_plain(program, device)
    if device.type == "cuda":
        assert "verify" in pg.explain(recorded)


@may_run_live
def test_c11_dropout_beside_live_parts(device):
    def program(run):
        net = run.net(nn.LSTM(6, 8, num_layers=2, dropout=0.3))
        inner = training(Run(lambda run: None, device, False), net)

        def step(x):
            loss, _ = inner(x)
            again, _ = inner(x * loss.item())
            return loss, again

        step = run.record(step, fallback="split")
        for n in range(10):
            if n in (5, 7):
                torch.manual_seed(n)
            run.log(*step(run.batch()))

    same_as_plain(program, device)


class Recomputed(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, hidden=None):
        return checkpoint(self.net, x, hidden, use_reentrant=False)


@may_run_live
@ways
def test_c06_dropout_in_a_part_that_is_recomputed(device, way):
    """Which sets the generator's state: live, the dropout of the second run begins anew for that."""

    def program(run):
        net = run.net(nn.LSTM(6, 8, num_layers=2, dropout=0.3))
        step = training(run, Recomputed(net), way)
        for _ in range(6):
            run.log(*step(run.batch()))
            run.log([p.grad for p in net.parameters()])

    same_as_plain(program, device)


@may_run_live
@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_c12_dropout_in_a_call_that_sets_the_generators_state(device, again, refused):
    """A capture that comes to nothing has set it, too: what was drawn from before does not begin anew for that."""
    read, put = (torch.cuda.get_rng_state, torch.cuda.set_rng_state) if device.type == "cuda" else (
        torch.get_rng_state, torch.set_rng_state)  # fmt: skip

    def program(run):
        net = run.net(nn.LSTM(6, 8, num_layers=2, dropout=0.3))

        def f(x):
            first = net(x)[0].detach()
            state = read()
            noise = torch.rand(3, device=x.device)
            put(state)
            second = net(x)[0].detach() if again else first + torch.rand(3, 1, device=x.device).sum()
            return first, noise, second * 2.0 if not refused or second.sum().item() > 0 else second

        f = run.record(f)
        for n in range(8):
            run.log(f(run.batch()))
            if n % 2:
                run.log(net(run.batch())[0])  # consumes what setting has left

    same_as_plain(program, device)
