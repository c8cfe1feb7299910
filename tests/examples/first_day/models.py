"""Models that people try first."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from tests.examples.first_day import Made, classifier, first_day, labelled, loss_of, mlp, update


def adam(*modules):
    return torch.optim.Adam([p for m in modules for p in m.parameters()], lr=1e-3)


@first_day()
def p06_gan(mended):
    g, d = mlp(4, 16, 6), mlp(6, 16, 1)
    opt_g, opt_d = adam(g), adam(d)

    def train_step(real):
        z = torch.randn(len(real), 4)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        judged = F.binary_cross_entropy_with_logits
        loss_d = update(opt_d, judged(d(real), ones) + judged(d(g(z).detach()), zeros))
        return loss_d, update(opt_g, judged(d(g(z)), ones))

    return Made(train_step, lambda f, i: f(labelled(i)[0]))


@first_day()
def p07_autoencoder(mended):
    net = mlp(6, 3, 6)
    opt = adam(net)
    return Made(net, lambda f, i: update(opt, F.mse_loss(f(labelled(i)[0]), labelled(i)[0])))


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(12, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 12)

    def forward(self, x, state):
        out, state = self.rnn(self.emb(x), state)
        return self.head(out), state


@first_day()
def p08_lstm_with_its_state(mended):
    net = Text()
    opt, text = adam(net), torch.randint(0, 12, (4, 200))
    carried = {"state": (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))}

    def train_step(x, y, state):
        out, (h, c) = net(x, state)
        return update(opt, F.cross_entropy(out.flatten(0, 1), y.flatten())), (h.detach(), c.detach())

    def step(f, i):
        x, y = text[:, i * 8 : i * 8 + 8], text[:, i * 8 + 1 : i * 8 + 9]
        loss, carried["state"] = f(x, y, carried["state"])
        return loss

    return Made(train_step, step)


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head, self.h = nn.GRUCell(6, 8), nn.Linear(8, 3), torch.zeros(8, 8)

    def forward(self, x):
        self.h = self.cell(x, self.h.detach())
        return self.head(self.h)


@first_day()
def p09_gru_that_keeps_its_state(mended):
    net = Remembers()
    opt = adam(net)

    def train_step(x, y):
        return update(opt, loss_of(net, x, y))

    def mended_step(x, y, h):
        h = net.cell(x, h)
        return update(opt, F.cross_entropy(net.head(h), y)), h.detach()

    def with_state(f, i):
        loss, net.h = f(*labelled(i), net.h)
        return loss

    return Made(mended_step, with_state) if mended else Made(train_step, lambda f, i: f(*labelled(i)))


class Encoder(nn.Module):
    def __init__(self, nested=True):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)
        self.emb, self.head = nn.Embedding(10, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(self.emb(x), src_key_padding_mask=x == 0).mean(1))


def tokens(i, n=8, length=6, classes=3):
    generator = torch.Generator().manual_seed(i)
    x = torch.randint(1, 10, (n, length), generator=generator)
    x[: n // 2, length // 2 :] = 0
    return x, torch.randint(0, classes, (n,), generator=generator)


@first_day(told="PG101", cut=True)
def p10_encoder_with_padding(mended):
    net = Encoder(nested=not mended)
    opt = adam(net)

    def train_step(x, y):
        net.train()
        loss = update(opt, loss_of(net, x, y))
        net.eval()
        with torch.no_grad():
            right = (net(x).argmax(1) == y).float().mean()
        return loss, right

    def mended_step(x, y):
        return update(opt, loss_of(net, x, y))

    return Made(mended_step if mended else train_step, lambda f, i: f(*tokens(i)))


class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, 8, 4, 4)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.zeros(1, 5, 8))
        self.body = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.body(x)[:, 0])


@first_day()
def p11_vit(mended):
    net = Patches()
    opt = adam(net)

    def train_step(x, y):
        return update(opt, loss_of(net, x, y))

    return Made(train_step, lambda f, i: f(labelled(i, 4, 64)[0].view(4, 1, 8, 8), labelled(i, 4)[1]))


TINY = {"vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
        "num_labels": 3}  # fmt: skip


def mask_of(x, mended):
    """Which tokens are no padding; mended: for each of them, which it looks at."""
    return (x != 0)[:, None, None, :].expand(-1, 1, x.shape[1], -1) if mended else (x != 0).long()


@first_day(told="PG101", needs="transformers", cut=True)
def p12_bert_fine_tuning(mended):
    from transformers import BertConfig, BertForSequenceClassification

    net = BertForSequenceClassification(BertConfig(**TINY))
    opt = adam(net)

    def train_step(x, mask, y):
        return update(opt, net(input_ids=x, attention_mask=mask, labels=y).loss)

    return Made(train_step, lambda f, i: f(tokens(i)[0], mask_of(tokens(i)[0], mended), tokens(i)[1]))


@first_day()
def p15_ema_teacher(mended):
    net, opt = classifier()
    teacher = copy.deepcopy(net)

    def train_step(x, y, step):
        loss = update(opt, loss_of(net, x, y) + 0.1 * F.mse_loss(net(x), teacher(x).detach()))
        decay = min(0.99, (1 + step) / (10 + step))
        with torch.no_grad():
            for a, b in zip(teacher.parameters(), net.parameters(), strict=True):
                a.mul_(decay).add_(b, alpha=1 - decay)
        return loss

    return Made(train_step, lambda f, i: f(*labelled(i), i))


@first_day()
def p16_actor_critic(mended):
    actor, critic = mlp(6, 16, 3), mlp(6, 16, 1)
    opt = adam(actor, critic)

    def train_step(obs, actions, returns):
        dist = torch.distributions.Categorical(logits=actor(obs))
        value = critic(obs).squeeze(1)
        advantage = (returns - value).detach()
        loss = -(dist.log_prob(actions) * advantage).mean() + F.mse_loss(value, returns) - 0.01 * dist.entropy().mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
        opt.step()
        return loss.detach()

    return Made(train_step, lambda f, i: f(*labelled(i), labelled(i, 8, 1)[0].squeeze(1)))


@first_day()
def p17_vae(mended):
    enc, dec = mlp(6, 16, 4), mlp(2, 16, 6)
    opt = adam(enc, dec)

    def train_step(x, beta):
        mu, logvar = enc(x).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).mean()
        return update(opt, F.mse_loss(dec(z), x) + beta * kl)

    return Made(train_step, lambda f, i: f(labelled(i)[0], min(1.0, i / 5)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(1, 4, 3, 2, 1), nn.ConvTranspose2d(4, 1, 4, 2, 1)
        self.time = nn.Embedding(10, 4)

    def forward(self, x, t):
        h = F.silu(self.down(x)) + self.time(t)[:, :, None, None]
        return self.up(h) + x


@first_day()
def p18_diffusion(mended):
    net = UNet()
    opt, alphas = adam(net), torch.linspace(0.99, 0.1, 10)

    def train_step(x):
        t = torch.randint(0, 10, (len(x),))
        noise, a = torch.randn_like(x), alphas[t][:, None, None, None]
        return update(opt, F.mse_loss(net(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise))

    return Made(train_step, lambda f, i: f(labelled(i, 4, 64)[0].view(4, 1, 8, 8)))


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, grad, 0.1 * grad)


@first_day()
def p23_own_autograd_function(mended):
    a, b = nn.Linear(6, 16), nn.Linear(16, 3)
    opt = adam(a, b)

    def train_step(x, y):
        return update(opt, F.cross_entropy(b(Clamped.apply(a(x))), y))

    return Made(train_step, lambda f, i: f(*labelled(i)))


@first_day()
def p24_gradients_of_samples(mended):
    net = mlp(6, 8, 3)
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def loss(p, x, y):
        return F.cross_entropy(torch.func.functional_call(net, p, (x[None],)), y[None])

    def norms(x, y):
        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
        return sum(g.flatten(1).pow(2).sum(1) for g in grads.values()).sqrt()

    return Made(norms, lambda f, i: f(*labelled(i)))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
                                        num_attention_heads=2, max_position_embeddings=64)).eval()  # fmt: skip


@first_day(told="PG101", needs="transformers", cut=True)
def p25_generate(mended):
    net = llama()
    net.generation_config.pad_token_id = 0

    def complete(x):
        with torch.no_grad():
            return net.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=3, do_sample=False)

    options = {"fallback": "split"} if mended else {}
    return Made(complete, lambda f, i: f(tokens(i, 2)[0].clamp(min=1)), options)


@first_day(needs="transformers")
def p25b_static_cache(mended):
    from transformers import StaticCache

    net = llama()
    cache = StaticCache(config=net.config, max_cache_len=32)

    def decode(token, position):
        with torch.no_grad():
            out = net(token, position_ids=position[None], cache_position=position, past_key_values=cache, use_cache=True)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    return Made(decode, lambda f, i: f(torch.tensor([[i % 9 + 1]]), torch.tensor([i])))


@first_day()
def p25c_beams(mended):
    net = mlp(8, 16, 10)
    emb = nn.Embedding(10, 8)

    def widen(beams, scores):
        with torch.no_grad():
            logp = net(emb(beams[:, -1])).log_softmax(1)
            best, at = (scores[:, None] + logp).flatten().topk(3)
            return torch.cat([beams[at // 10][:, 1:], (at % 10)[:, None]], 1), best

    return Made(widen, lambda f, i: f(tokens(i, 3)[0], labelled(i, 3, 1)[0].squeeze(1)))


@first_day()
def p31_attention(mended):
    attention, head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)
    opt = adam(attention, head)

    def train_step(x, y):
        out, _ = attention(x, x, x)
        return update(opt, F.cross_entropy(head(out.mean(1)), y))

    return Made(train_step, lambda f, i: f(labelled(i, 4, 40)[0].view(4, 5, 8), labelled(i, 4)[1]))


@first_day(told="PG1401 PG1402")
def p32_ragged_bags(mended):
    bag, head = nn.EmbeddingBag(10, 8), nn.Linear(8, 3)
    opt = adam(bag, head)

    def train_step(ids, offsets, y):
        return update(opt, F.cross_entropy(head(bag(ids, offsets)), y))

    def step(f, i):
        n = 20 if mended else 12 + i  # mended: padded to a few shapes
        return f(torch.arange(n) % 10, torch.tensor([0, 3, 5, 9]), labelled(i, 4)[1])

    return Made(train_step, step)


@first_day()
def p33_packed_sequences(mended):
    rnn, head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)
    opt = adam(rnn, head)
    lengths = torch.tensor([5, 4, 3, 2])

    def train_step(x, y):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        _, (h, _) = rnn(packed)
        return update(opt, F.cross_entropy(head(h[-1]), y))

    return Made(train_step, lambda f, i: f(labelled(i, 4, 30)[0].view(4, 5, 6), labelled(i, 4)[1]))
