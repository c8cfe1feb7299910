"""C3, C4, C7: objects of packages, where these are installed: transformers' caches, TensorDict, BlockMask; and a stand-in that
is registered with pytree, and needs none."""

import copy
import functools
from collections.abc import MutableMapping

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils import _pytree

import phonograph as pg
from phonograph.testing import assert_same
from tests.helpers import counts, may_run_live, ramp, reasons

# ---------------------------------------------------------------------------------------------------
# transformers


def _llama(device):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(device).eval()


def _decoded(model, step, device, length):
    from transformers import StaticCache

    cache, found = StaticCache(config=model.config, max_cache_len=24), []
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]], device=device), past_key_values=cache, use_cache=True).logits[:, -1]
        for _ in range(length):
            token = logits.argmax(-1, keepdim=True)
            logits = step(token, cache)
            found.append(logits.clone())
    return found


@pytest.mark.parametrize("how", ["function", "forward"])
def test_c03_a_hand_written_loop_with_a_static_cache(device, how):
    model = _llama(device)

    def step(token, cache):
        return model(token, past_key_values=cache, use_cache=True).logits[:, -1]

    recorded = pg.record(step if how == "function" else model.forward)
    run = recorded if how == "function" else lambda t, c: recorded(t, past_key_values=c, use_cache=True).logits[:, -1]
    for _ in range(3):
        assert_same(_decoded(model, run, device, 12), _decoded(model, step, device, 12))
    live, _, replayed = counts(recorded)
    assert live <= 4, pg.explain(recorded)
    assert live + replayed == 36


@may_run_live
@pytest.mark.parametrize("how", ["module", "forward"])
def test_c03_generate_with_a_static_cache(device, how):
    """A new cache has counters on the CPU, and moves them where it is first used: on a GPU that call is live, the others
    are not."""
    prompts = [torch.tensor([[1, 2, 3 + i]], device=device) for i in range(3)]
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static", "pad_token_id": 0,
               "disable_compile": True}  # fmt: skip
    plain = _llama(device)
    expected = [plain.generate(prompt, **options) for prompt in prompts]
    model = _llama(device)
    if how == "module":
        recorded = pg.record(model)
    else:
        recorded = model.forward = pg.record(model.forward)
    assert_same([model.generate(prompt, **options) for prompt in prompts], expected)
    live, _, replayed = counts(recorded)
    if device.type == "cuda":
        live -= len(prompts) - 1
        assert "past_key_values.layers[0].cumulative_length` on cpu" in reasons(recorded)
        assert "calls that get it then are recorded" in reasons(recorded)
        assert len(pg.stats(recorded).refusals) == 1, reasons(recorded)
    else:
        assert not pg.stats(recorded).refusals
    assert live <= 4 < replayed, pg.explain(recorded)


@may_run_live
def test_c04_a_model_that_makes_its_cache_returns_it(device):
    """On a GPU it makes a mask in a capture, and attention with one may round differently."""
    pytest.importorskip("transformers")
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6) if device.type == "cuda" else assert_same
    model = _llama(device)
    recorded = pg.record(model.forward)
    with torch.no_grad():
        for n in range(4):
            ids = torch.tensor([[1, 2, 3 + n]], device=device)
            found, expected = recorded(ids, use_cache=True), model(ids, use_cache=True)
            close(found.logits, expected.logits)
            for a, b in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
                close((a.keys, a.values), (b.keys, b.values))
            more = torch.tensor([[5]], device=device)
            a = model(more, past_key_values=copy.deepcopy(found.past_key_values)).logits
            close(a, model(more, past_key_values=expected.past_key_values).logits)
    assert counts(recorded)[2] == 3, pg.explain(recorded)


def test_c09_a_field_that_compiled_code_of_a_package_reads(device):
    pydantic = pytest.importorskip("pydantic")

    class Settings(pydantic.BaseModel):
        rate: float = 2.0

    settings, x = Settings(), ramp(device, 3)

    def f(x):
        return x * settings.model_dump()["rate"]

    recorded = pg.record(f)
    for settings.rate in (2.0, 2.0, 2.0, 2.0, 3.0, 3.0):
        assert_same(recorded(x), f(x))


# ---------------------------------------------------------------------------------------------------
# TensorDict, and a class of that kind


class _Sizes:
    """Made anew each time that its object is taken apart, equal to more than it should be."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


class Fields(MutableMapping):
    """Registered with pytree, with a function and an object of its own in the context, as `TensorDict` is."""

    def __init__(self, fields, sizes):
        self._fields = dict(fields)
        self.sizes = sizes

    def __getitem__(self, key):
        return self._fields[key]

    def __setitem__(self, key, value):
        self._fields[key] = value

    def __delitem__(self, key):
        del self._fields[key]

    def __iter__(self):
        return iter(self._fields)

    def __len__(self):
        return len(self._fields)


def _made(values, context):
    return Fields(zip(context["keys"], values, strict=True), context["sizes"].sizes)


_pytree.register_pytree_node(
    Fields,
    lambda d: (list(d.values()), {"keys": list(d), "constructor": _made, "cls": Fields, "sizes": _Sizes(d.sizes)}),
    lambda values, context: context["constructor"](values, context),
)


def _fields(fields, n):
    return Fields(fields, torch.Size([n]))


def _tensordict(fields, n):
    return pytest.importorskip("tensordict").TensorDict(fields, batch_size=[n])


dictionaries = pytest.mark.parametrize("make", [_fields, _tensordict], ids=["stand-in", "tensordict"])


def _items(d):
    return {key: d[key] for key in d.keys()}  # noqa: SIM118


@dictionaries
def test_c04_an_update_that_takes_and_gives_dictionaries_of_tensors(device, make):
    make({}, 1)

    def program():
        torch.manual_seed(0)
        actor = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(device)
        optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)

        def update(data):
            optimizer.zero_grad()
            logits = actor(data["observations"]).log_softmax(-1)
            ratio = (logits.gather(1, data["actions"]) - data["log_probs"]).exp()
            loss = -torch.min(ratio * data["advantages"], ratio.clamp(0.8, 1.2) * data["advantages"]).mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
            optimizer.step()
            return (
                make({"loss": loss.detach(), "norm": norm.detach(), "ratio": ratio.detach()}, 1)
                if make is _fields
                else (make({"loss": loss.detach()[None], "norm": norm.detach()[None], "ratio": ratio.detach()[:1, 0]}, 1))
            )

        return actor, update

    (_, live), (_, other) = program(), program()
    recorded = pg.record(other)
    for n in range(8):
        torch.manual_seed(n)
        fields = {"observations": torch.randn(5, 4), "actions": torch.randint(2, (5, 1)), "log_probs": torch.randn(5, 1),
                  "advantages": torch.randn(5, 1)}  # fmt: skip
        data = {key: value.to(device) for key, value in fields.items()}
        found, expected = recorded(make(data, 5)), live(make(data, 5))
        assert type(found) is type(expected)
        assert_same(_items(found), _items(expected))
    assert counts(recorded) == (1, 1, 7), pg.explain(recorded)


@dictionaries
def test_c03_what_is_set_in_such_a_dictionary_is_set_for_the_caller(device, make):
    make({}, 1)

    def gae(container):
        container["advantages"] = container["rewards"] * 2
        container["returns"] = container["advantages"] + container["values"]
        del container["values"]
        container["rewards"] = container["rewards"] - 1
        return container

    recorded = pg.record(gae)
    for n in range(6):
        given, other = (make({"rewards": ramp(device, 5) + n, "values": ramp(device, 5)}, 5) for _ in range(2))
        assert recorded(given) is given
        assert_same(_items(given), _items(gae(other)))
    assert counts(recorded) == (1, 1, 5), pg.explain(recorded)


class Rows:
    """Registered with pytree, and no mapping; its items are set by a method of its own."""

    def __init__(self, source, batch_size):
        self._source, self.batch_size = dict(source), torch.Size(batch_size)

    def __getitem__(self, name):
        return self._source[name]

    def __setitem__(self, name, value):
        self._source[name] = value

    def view(self, *sizes):
        return Rows({name: t.reshape(*sizes) for name, t in self._source.items()}, sizes)


_pytree.register_pytree_node(
    Rows,
    lambda rows: (list(rows._source.values()), {"keys": list(rows._source), "batch_size": rows.batch_size, "of": Rows}),
    lambda values, context: context["of"](dict(zip(context["keys"], values, strict=True)), context["batch_size"]),
)


def test_c03_what_is_set_in_an_object_that_pytree_knows_is_set_for_the_caller(device):
    def policy(rows, extra):
        rows["a"], rows["b"] = rows["x"] * 2, -rows["x"]
        rows["x"] = rows["x"] + 1
        rows.batch_size = torch.Size([4, 1])
        extra["seen"] = rows["a"]
        return rows, rows.view(2, 2) if "c" not in rows._source else rows["c"]

    recorded = pg.record(lambda rows, extra: policy(rows, extra))
    kept = []
    for n in range(12):
        fields = {"x": ramp(device, 4) + n} | ({"c": ramp(device, 1)} if n % 3 == 2 else {})
        fields = dict(reversed(fields.items())) if n == 11 else fields
        (given, extra), (other, more) = ((Rows(fields, [4]), {}) for _ in range(2))
        if n == 6:
            given["x"] = other["x"] = ramp(device, 4) - 3
        found, expected = recorded(given, extra), policy(other, more)
        assert found[0] is given
        kept.append((given._source, other._source))
        for a, b in [*kept, (extra, more)]:
            assert [*a] == [*b]
            assert_same(a, b)
        assert extra["seen"] is given["a"]
        assert given.batch_size == other.batch_size
        one, two = (x[1]._source if isinstance(x[1], Rows) else x[1] for x in (found, expected))
        assert_same(one["a"] if isinstance(one, dict) else one, two["a"] if isinstance(two, dict) else two)
    assert pg.stats(recorded).replayed >= 6, pg.explain(recorded)


@dictionaries
def test_c07_another_batch_size_or_other_keys_are_another_signature(device, make):
    recorded = pg.record(lambda d: sum(d[key].sum() for key in d.keys()))  # noqa: SIM118
    for n in range(12):
        fields = {key: ramp(device, 4, 2) + n for key in ("a", "b", "c")[: 2 + n % 2]}
        assert_same(recorded(make(fields, 4)), sum(x.sum() for x in fields.values()))
    assert counts(recorded) == (2, 2, 10), pg.explain(recorded)


# ---------------------------------------------------------------------------------------------------
# Masks, caches that are modules


@pytest.mark.parametrize("each", [False, True], ids=["one mask", "one in each call"])
def test_c07_a_block_mask(device, each):
    def causal(b, h, q, k):
        return q >= k

    def made():
        return create_block_mask(causal, None, None, 256, 256, device=str(device))

    def f(mask, x):
        return mask.kv_num_blocks.sum() + x, mask

    recorded, mask = pg.record(f), made()
    for n in range(5):
        mask = made() if each else mask
        x = ramp(device, 3) + n
        found, same = recorded(mask, x)
        assert same is mask
        assert_same(found, f(mask, x)[0])
    assert counts(recorded) == (1, 1, 4), pg.explain(recorded)


class KVCache(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("k", torch.zeros(1, 2, 8, 4))

    def update(self, input_pos, k):
        self.k[:, :, input_pos] = k
        return self.k


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)
        self.kv_cache = None

    def forward(self, token, input_pos):
        x = self.embed(token).view(1, -1, 2, 4).transpose(1, 2)
        k = self.kv_cache.update(input_pos, x)
        mask = (torch.arange(8, device=token.device) <= input_pos)[None]
        y = torch.nn.functional.scaled_dot_product_attention(x, k, k, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(1, -1, 8))


def test_c03_decoding_with_caches_that_are_modules(device):
    torch.manual_seed(0)
    model = Attention().to(device)
    other = copy.deepcopy(model)
    for m in (model, other):
        m.kv_cache = KVCache().to(device)

    def one(model, token, input_pos):
        with torch.no_grad():
            return model(token, input_pos).argmax(-1)

    recorded = pg.record(one)
    token = expected = torch.tensor([[1]], device=device)
    for n in range(8):
        position = torch.tensor([n], device=device)
        token, expected = recorded(model, token.clone(), position), one(other, expected, position)
        assert_same(token, expected)
    assert_same(model.kv_cache.k, other.kv_cache.k)
    assert counts(recorded) == (1, 1, 7), pg.explain(recorded)
