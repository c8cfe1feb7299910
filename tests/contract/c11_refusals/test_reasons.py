"""C11, C19: what is said of a call that runs live. A program for each way to be refused that an ordinary one comes to: each is
told once, with the line that is the cause (marked ``# here``), in words of PyTorch's users, and with what to do."""

import ast
import asyncio
import copy
import ctypes
import dataclasses
import datetime
import gc
import inspect
import io
import linecache
import logging
import math
import os
import pathlib
import queue
import random
import re
import subprocess
import sys
import threading
import time
import uuid
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import phonograph as pg
from phonograph import reasons as coded
from phonograph.engine import contained, making
from phonograph.errors import Refusal
from phonograph.values.keys import NoSignature
from phonograph.values.wording import Naming, excerpt, failure, operator, source_of
from tests.helpers import may_run_live, ramp

SOURCE = pathlib.Path(pg.__file__).parent
SHOWS_EXPRESSIONS = sys.version_info >= (3, 11)
WAYS = []

logger = logging.getLogger("tests.of.reasons")
seen = []


def way(*words, remedy="", only=""):
    """A program, words of the reason (in backticks: an expression), some of the remedy, and the device that it needs."""

    def noted(program):
        WAYS.append(pytest.param(program, words, remedy, only, id=program.__name__))
        return program

    return noted


def recorded(function, times=4, **options):
    """The recorded function, and how often to call it."""
    f = pg.record(function, warmup=1, **{"fallback": "live", **options})
    return [f] * times


# ---------------------------------------------------------------------------------------------------
# A value that the host reads


@way("`x.sum().item()`", "value", remedy="use the tensor itself")
def item(device):
    def f(x):
        return x * x.sum().item()  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("`float(x[0])`", remedy="return the tensor and read it outside")
def to_a_number(device):
    def f(x):
        return x + float(x[0])  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("`int(x[0])`", remedy="return the tensor")
def sliced(device):
    def f(x):
        return x[: int(x[0])]  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("`x.sum() > 3`", remedy="`if`")
def branch(device):
    def f(x):
        if x.sum() > 3:  # here
            return x * 2
        return x

    for call in recorded(f):
        call(ramp(device, 4))


@way("value", remedy="`if`", only="cuda")
def an_assertion(device):
    def f(x):
        assert (x > 0).all()  # here
        return x * 2

    for call in recorded(f):
        call(ramp(device, 4))


@way("isnan", remedy="torch.where")
def a_guard_against_nan(device):
    net = nn.Linear(4, 1, device=device)

    def step(x):
        loss = net(x).sum()
        loss.backward()
        if torch.isnan(loss):  # here
            return None
        return loss.detach()

    for call in recorded(step):
        call(ramp(device, 4))


@way("`x.tolist()`", remedy="outside")
def listing(device):
    def f(x):
        return sum(x.tolist())  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("x.cpu()", remedy="outside")
def to_numpy(device):
    pytest.importorskip("numpy")

    def f(x):
        return x * float(x.cpu().numpy().sum())  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("hands the address of a tensor to code outside torch", remedy="@pg.live", only="cpu")
def an_address(device):
    def f(x):
        ctypes.memset(x.data_ptr(), 0, 4)  # here
        return x * 2

    for call in recorded(f):
        call(ramp(device, 4))


@way("to_dlpack", remedy="@pg.live")
def a_capsule(device):
    def f(x):
        torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)).mul_(3)  # here
        return x * 2

    for call in recorded(f):
        call(ramp(device, 4))


@way("`math.sqrt(x[0])`", remedy="torch.where")
def pythons_arithmetic(device):
    def f(x):
        return x * math.sqrt(x[0])  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("`max([x[0], x[1]])`", remedy="torch.where")
def pythons_maximum(device):
    def f(x):
        return x * max([x[0], x[1]])  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("`torch.tensor([x[0], 2.0])`", remedy="torch.stack", only="cpu")
def a_tensor_of_tensors(device):
    def f(x):
        return torch.tensor([x[0], 2.0])  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("print", remedy="@pg.live")
def printing_a_tensor(device):
    def f(x):
        print(x.sum(), file=io.StringIO())  # here
        return x * 2

    for call in recorded(f):
        call(ramp(device, 4))


@way(".item()", "x.sum():.2f", remedy="return the tensor")
def formatting(device):
    def f(x):
        return x * 2, f"{x.sum():.2f}"  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("`torch.equal(x, x.flip(0))`", remedy="(a == b).all()")
def equality(device):
    def f(x):
        return x * 2 if torch.equal(x, x.flip(0)) else x  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("`torch.allclose(x, x + 1)`", remedy="torch.isclose")
def closeness(device):
    def f(x):
        return x * 2 if torch.allclose(x, x + 1) else x  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("scaler.step(opt)", remedy="fused=True")
def a_gradient_scaler(device):
    net = nn.Linear(4, 1, device=device)
    opt = torch.optim.Adam(net.parameters())
    scaler = torch.amp.GradScaler(device.type)

    def step(x):
        opt.zero_grad()
        loss = net(x).sum()
        scaler.scale(loss).backward()
        scaler.step(opt)  # here
        scaler.update()
        return loss.detach()

    for call in recorded(step):
        call(ramp(device, 4))


@way("item(", remedy="outside")
def in_a_helper(device):
    def helper(x):
        return x.sum().item()  # here

    for call in recorded(lambda x: x + helper(x)):
        call(ramp(device, 4))


@way("a check of torch's", "except", remedy="error_if_nonfinite", only="cpu")
def clipping_that_looks(device):
    net, note = nn.Linear(4, 1, device=device), pg.live(lambda x: None)

    def step(x):
        note(x)
        net.zero_grad()
        net(x).sum().backward()
        try:
            return nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)  # here
        except RuntimeError:
            return x.sum()

    for call in recorded(step):
        call(ramp(device, 4))


@way("value", remedy="error_if_nonfinite", only="cuda")
def clipping_that_looks_on_a_gpu(device):
    net = nn.Linear(4, 1, device=device)

    def step(x):
        net.zero_grad()
        net(x).sum().backward()
        return nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)  # here

    for call in recorded(step):
        call(ramp(device, 4))


@way("a check of torch's", "except", remedy="validate_args=False")
def a_distribution(device):
    note = pg.live(lambda x: None)

    def f(x):
        note(x)
        try:
            return torch.distributions.Categorical(probs=x / x.sum(), validate_args=True).entropy()  # here
        except ValueError:
            return x.sum()

    for call in recorded(f):
        call(ramp(device, 4))


@way("`torch.linalg.cholesky(x.view(2, 2))` looks at a status", remedy="cholesky_ex", only="cuda")
def a_root_that_is_tried(device):
    def f(x):
        try:
            return torch.linalg.cholesky(x.view(2, 2))  # here
        except torch.linalg.LinAlgError:
            return x.view(2, 2)

    for call in recorded(f):
        call(torch.eye(2, device=device))


@way("bernoulli", "after it has looked at a status", remedy="before", only="cuda")
def a_draw_by_a_solution(device):
    def f(x):
        y = torch.linalg.solve(x.view(2, 2), x.new_ones(2))
        return torch.bernoulli(y)  # here

    for call in recorded(f):
        call(2 * torch.eye(2, device=device))


@way("opt.step(closure)", remedy="record the model")
def lbfgs_inside(device):
    net = nn.Linear(4, 1, device=device)
    opt = torch.optim.LBFGS(net.parameters())

    def step(x):
        def closure():
            opt.zero_grad()
            loss = net(x).pow(2).sum()
            loss.backward()
            return loss

        return opt.step(closure).detach()  # here

    for call in recorded(step):
        call(ramp(device, 4) / 10)


@way("closure", remedy="record the model")
def lbfgs(device):
    net = nn.Linear(4, 1, device=device)
    opt = torch.optim.LBFGS(net.parameters())

    def closure():
        opt.zero_grad()
        loss = net(torch.ones(4, device=device)).pow(2).sum()
        loss.backward()
        return loss

    for call in recorded(opt.step):
        call(closure)  # here


@way("x.sum().item()", "another number", remedy="torch.where")
def a_number_between_segments(device):
    def f(x):
        return x * x.sum().item()  # here

    for n, call in enumerate(recorded(f, fallback="split")):
        call(ramp(device, 4, start=n))


# ---------------------------------------------------------------------------------------------------
# A shape that depends on data


@way("`x.nonzero()`", "shape", remedy="torch.where")
def nonzero(device):
    def f(x):
        return x.nonzero()  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("`x[x > 2]`", "shape", remedy="masked_fill")
def mask(device):
    def f(x):
        return x[x > 2] * 2  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("`y[x > 1]`", "mask", remedy="torch.where")
def writing_where_a_mask_says(device):
    def f(x):
        y = x.clone()
        y[x > 1] = x[1:] * 3  # here
        return y

    for call in recorded(f):
        call(ramp(device, 4))


@way("torch.masked_select", "shape", remedy="torch.where")
def selected(device):
    def f(x):
        return torch.masked_select(x, x > 2)  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("torch.unique", "shape", remedy="sort")
def unique(device):
    def f(x):
        return torch.unique(x)  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("torch.where", "shape", remedy="torch.nonzero_static")
def where_of_a_condition(device):
    def f(x):
        return torch.where(x > 2)[0]  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("repeat_interleave", "shape", remedy="output_size=")
def repeats(device):
    def f(x):
        return torch.repeat_interleave(x, x.int())  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("bincount", "shape", remedy="scatter_add_")
def bin_counts(device):
    def f(x):
        return torch.bincount(x.long())  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("`F.one_hot(x.long())`", remedy="torch.arange")
def one_hot(device):
    def f(x):
        return F.one_hot(x.long())  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("pack_padded_sequence", remedy="padded tensors", only="cpu")
def packing(device):
    lstm = nn.LSTM(3, 2, device=device).requires_grad_(False)

    def f(x, lengths):
        return lstm(nn.utils.rnn.pack_padded_sequence(x, lengths))[1][0]  # here

    for call in recorded(f):
        call(ramp(device, 4, 2, 3), torch.tensor([4, 2]))


@way("`x[x > n]`", "another shape", remedy="fixed shape")
def another_shape_between_segments(device):
    def f(x, n):
        return x[x > n].sum() * 2  # here

    for n, call in enumerate(recorded(f, times=5, fallback="split")):
        call(ramp(device, 9), torch.tensor(float(n), device=device))


# ---------------------------------------------------------------------------------------------------
# What a tensor is


@way("y.resize_(2)", "memory", remedy="new tensor")
def resized(device):
    def f(x):
        y = x.clone()
        y.resize_(2)  # here
        return y

    for call in recorded(f):
        call(ramp(device, 4))


@way("y.set_(x)", "memory", remedy="copy_")
def set_to_another(device):
    def f(x):
        y = torch.empty(0, device=device)
        y.set_(x)  # here
        return y

    for call in recorded(f):
        call(ramp(device, 4))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@way("out=y", "resizes", remedy="right size")
def out_of_another_size(device):
    def f(x):
        y = torch.empty(1, device=device)
        torch.add(x, x, out=y)  # here
        return y

    for call in recorded(f):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="An output with one or more elements was resized")
            call(ramp(device, 4))


@way("x.to_sparse()", remedy="outside")
def sparse_inside(device):
    def f(x):
        return x.to_sparse().to_dense()  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("sparse", remedy="outside")
def returns_a_sparse_tensor(device):
    index = torch.tensor([[0, 1, 2, 3]], device=device)

    def f(x):
        return torch.sparse_coo_tensor(index, x)  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("not dense", "weight", remedy="sparse=False")
def sparse_gradients(device):
    table = nn.Embedding(4, 2, sparse=True, device=device)
    opt = torch.optim.SGD(table.parameters(), lr=0.1)

    def step(x):  # here
        opt.zero_grad()
        loss = table(x).sum()
        loss.backward()
        opt.step()
        return loss.detach()

    for call in recorded(step):
        call(torch.tensor([1, 2], device=device))


@way("quantized", remedy="outside", only="cpu")
def quantized(device):
    def f(x):
        return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8).dequantize()  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("as_strided", remedy="slices")
def beside_an_argument(device):
    def f(x):
        return x.as_strided((2,), (1,), 1) * 2  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("_version", remedy="outside")
def asking_for_the_version(device):
    def f(x):
        return x * x._version  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("is_leaf", remedy="detached")
def asking_for_the_history(device):
    def f(x):
        return (x * 2 if x.is_leaf else x * 3).detach()  # here

    weight = ramp(device, 4).requires_grad_()
    for call in recorded(f):
        call(weight * 2)


# ---------------------------------------------------------------------------------------------------
# An argument


@way("sparse_coo tensor as `x`", remedy="dense")
def a_sparse_argument(device):
    for call in recorded(lambda x: x.to_dense()):
        call(ramp(device, 4).to_sparse())  # here


@way("nested tensor as `x`", remedy="padded")
def a_nested_argument(device):
    for call in recorded(lambda x: x * 2):
        call(torch.nested.nested_tensor([ramp(device, 2), ramp(device, 3)]))  # here


class Tagged(torch.Tensor):
    pass


@way("Tagged as `x`", remedy="as_subclass(torch.Tensor)")
def a_subclass_argument(device):
    for call in recorded(lambda x: x * 2):
        call(ramp(device, 4).as_subclass(Tagged))  # here


@way("attributes", "as `x`", remedy="view_as")
def an_argument_with_attributes(device):
    x = ramp(device, 4)
    x.tag = "a"
    for call in recorded(lambda x: x * 2):
        call(x)  # here


@way("gradient or hooks", "as `x`", remedy="view")
def an_argument_with_a_hook(device):
    for call in recorded(lambda x: x * 2):
        x = ramp(device, 4).requires_grad_() * 2
        x.register_hook(lambda g: g)
        call(x)  # here


@way("conjugated", "as `x`", remedy="resolve_conj()")
def a_conjugated_argument(device):
    for call in recorded(lambda x: x * 2):
        call(torch.view_as_complex(ramp(device, 4, 2)).conj())  # here


@way("generator as `g`", remedy="numbers")
def a_generator(device):
    for call in recorded(lambda x, g: x * 2):
        call(ramp(device, 4), (i for i in range(3)))  # here


class Config:
    """Of the user's."""

    def __init__(self):
        self.log = io.StringIO()


@way("StringIO as `batch['meta'][1].log`", remedy="tensors")
def an_object_in_a_batch(device):
    for call in recorded(lambda batch, scale: batch["x"] * scale):
        call({"x": ramp(device, 4), "meta": [1, Config()]}, scale=2.0)  # here


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    config: object


@way("StringIO as `batch.config.log`", remedy="tensors")
def an_object_in_a_dataclass(device):
    for call in recorded(lambda batch: batch.x * 2):
        call(Batch(ramp(device, 4), Config()))  # here


@way("StringIO as `rest[1].log`", remedy="tensors")
def an_object_among_many(device):
    def f(x, *rest):
        return x * rest[0]

    for call in recorded(f):
        call(ramp(device, 4), 2, Config())  # here


@way("StringIO as `log`", remedy="tensors")
def a_file_by_name(device):
    for call in recorded(lambda x, log: x * 2):
        call(ramp(device, 4), log=io.StringIO())  # here


@way("numpy.ndarray as `y`", remedy="torch.from_numpy")
def an_array(device):
    numpy = pytest.importorskip("numpy")
    for call in recorded(lambda x, y: x * 2):
        call(ramp(device, 4), numpy.ones(3000))  # here


@way("Config", "key of `d`", remedy="keys")
def an_object_as_a_key(device):
    for call in recorded(lambda x, d: x * 2):
        call(ramp(device, 4), {Config(): 1})  # here


@way("contains itself", remedy="container")
def a_list_in_itself(device):
    items = [ramp(device, 4)]
    items.append(items)
    for call in recorded(lambda items: items[0] * 2):
        call(items)  # here
    items.clear()


@way("another string of `n`", remedy="outside")
def a_string_that_changes(device):
    f = pg.record(lambda x, n: x * len(n), warmup=1)
    for n in range(80):
        f(ramp(device, 4), "n" * n)  # here


@way("shape", "`batch['x']`", remedy="pad")
def a_shape_that_changes(device):
    f = pg.record(lambda batch: batch["x"] * 2, warmup=1)
    for n in range(1, 80):
        f({"x": ramp(device, 1 + 37 * n % 127)})  # here


@way("size that grows", "dimension 0 of `batch['x']` by 1", remedy="pad")
def a_size_that_grows(device):
    f = pg.record(lambda batch: batch["x"] * 2, warmup=1)
    for n in range(1, 10):
        f({"x": ramp(device, n)})  # here


@way("shares memory", remedy="separate")
def overlapping_arguments(device):
    def f(a, b):  # here
        a.mul_(2)
        return a + b

    x = ramp(device, 4)
    for call in recorded(f):
        call(x[:3], x[1:])


@way("meta", remedy="on the CPU or a GPU")
def a_meta_argument(device):
    for call in recorded(lambda x: x * 2):
        call(torch.empty(3, device="meta"))  # here


@way("`x` on cuda", "`y` on cpu", remedy="one device", only="cuda")
def arguments_on_two_devices(device):
    for call in recorded(lambda x, y: x * y.to(x.device)):
        call(ramp(device, 4), torch.ones(4))  # here


@way("`x` on cpu", "works with", remedy="move", only="cuda")
def an_argument_on_the_cpu(device):
    net = nn.Linear(4, 2, device=device).requires_grad_(False)
    for call in recorded(lambda x: net(x.to(device))):
        call(torch.ones(4))  # here


# ---------------------------------------------------------------------------------------------------
# Where it is called


@way("torch.func", remedy="calls the transform")
def inside_vmap(device):
    f = pg.record(lambda x: x * 2, warmup=1)
    for _ in range(3):
        torch.vmap(lambda x: f(x))(ramp(device, 2, 4))  # here


@way("torch.func", remedy="calls the transform")
def inside_grad(device):
    f = pg.record(lambda x: (x * x).sum(), warmup=1)
    for _ in range(3):
        torch.func.grad(f)(ramp(device, 4))  # here


@way("Mode", remedy="PHONOGRAPH=off")
def under_a_mode(device):
    from torch.utils.flop_counter import FlopCounterMode

    f = pg.record(lambda x: x @ x, warmup=1)
    with FlopCounterMode(display=False):
        for _ in range(3):
            f(ramp(device, 4, 4))  # here


@way("`torch.linalg.pinv(x.view(2, 2))` under autocast", remedy="enabled=False")
def types_that_nobody_tells(device):
    def f(x):
        return torch.linalg.pinv(x.view(2, 2))  # here

    for call in recorded(f):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            call(ramp(device, 4))


@way("matrix_rank", "unwritten", remedy="copy_")
def a_rank_that_is_to_be_written(device):
    def f(x, rank):
        torch.linalg.matrix_rank(x.view(2, 2), out=rank)  # here
        return rank + 1

    for call in recorded(f):
        call(ramp(device, 4), torch.zeros((), dtype=torch.int64, device=device))


@way("save_on_cpu", remedy="leave that context")
def under_saved_tensors_hooks(device):
    f = pg.record(lambda x: x * 2, warmup=1)
    with torch.autograd.graph.save_on_cpu():
        for _ in range(3):
            f(ramp(device, 4))  # here


@way("forward-mode", remedy="torch.func.jvp")
def under_forward_mode(device):
    f = pg.record(lambda x: x * 2, warmup=1)
    with forward_ad.dual_level():
        for _ in range(3):
            f(forward_ad.make_dual(ramp(device, 4), ramp(device, 4)))  # here


@way("parametrize.cached()", remedy="outside")
def under_a_cache_of_parametrizations(device):
    net = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, device=device)).requires_grad_(False)

    def f(x):  # here
        return net(x)

    calls = recorded(f)
    with nn.utils.parametrize.cached():
        for call in calls:
            call(ramp(device, 4))


# ---------------------------------------------------------------------------------------------------
# Effects


@way("print()", remedy="@pg.live")
def printing(device):
    def f(x):
        print("step", file=io.StringIO())  # here
        return x * 2

    for call in recorded(f):
        call(ramp(device, 4))


@way("open()", remedy="outside")
def opening(device):
    def f(x):
        with open(os.devnull):  # here
            return x * 2

    for call in recorded(f):
        call(ramp(device, 4))


@way("warnings.warn()", remedy="outside")
def warning(device):
    def f(x):
        warnings.warn("mind the gap", UserWarning, stacklevel=1)  # here
        return x * 2

    for call in recorded(f):
        call(ramp(device, 4))


@way("clock", remedy="pass the value")
def timing(device):
    def f(x):
        return x * (time.perf_counter() > 0)  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("clock", remedy="pass the value")
def the_date(device):
    def f(x):
        return x * (datetime.datetime.now().year > 0)  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("os.urandom", remedy="torch's generators")
def entropy(device):
    def f(x):
        return x * os.urandom(1)[0]  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("uuid4", remedy="outside")
def a_unique_name(device):
    def f(x):
        return x * 2, str(uuid.uuid4())  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("random", remedy="torch's generators")
def drawing(device):
    def f(x):
        return x * random.random()  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("numpy.random", remedy="torch's generators")
def drawing_with_numpy(device):
    numpy = pytest.importorskip("numpy")

    def f(x):
        scale = float(numpy.random.rand())  # here
        return x * scale

    for call in recorded(f):
        call(ramp(device, 4))


@way("manual_seed", remedy="before the call")
def seeding(device):
    def f(x):
        torch.manual_seed(0)  # here
        return x * torch.rand_like(x)

    for call in recorded(f):
        call(ramp(device, 4))


@way("logs a message", remedy="outside")
def logs(device):
    def f(x):
        logger.warning("step")  # here
        return x * 2

    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    for call in recorded(f):
        call(ramp(device, 4))


@way("`x.sum().item()`", remedy="return the tensor")
def what_is_logged_on_its_way_out(device):
    def f(x):
        try:
            return x * x.sum().item()  # here
        except Exception:
            logger.exception("failed")
            raise

    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    for call in recorded(f):
        call(ramp(device, 4))


@way("`x.sum().item()`", remedy="return the tensor")
def what_is_printed_and_swallowed(device):
    def f(x):
        try:
            return x * x.sum().item()  # here
        except Exception as error:
            print(error, file=io.StringIO())
            return x

    for call in recorded(f):
        call(ramp(device, 4))


@way("queue", remedy="outside")
def a_queue(device):
    results = queue.Queue()

    def f(x):
        results.put(1)  # here
        return x * 2

    for call in recorded(f):
        call(ramp(device, 4))


@way("list", "append", remedy="return the value")
def losses_in_a_list(device):
    losses = []

    def f(x):
        y = x * 2
        losses.append(y)  # here
        return y * len(losses)

    for call in recorded(f):
        call(ramp(device, 4))


@way("n", "outlives", remedy="copy_")
def a_count_in_a_dictionary(device):
    state = {}

    def f(x):
        state["n"] = state.get("n", 0) + 1  # here
        return x * len(str(state["n"]))

    for call in recorded(f):
        call(ramp(device, 4))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x):
        self.steps = self.steps + 1  # here
        return x * len(str(self.steps))


@way("self.steps", "outlives", remedy="copy_")
def a_module_that_counts(device):
    net = pg.record(Counting(), warmup=1)
    for _ in range(12):
        net(ramp(device, 4))


a_module_that_counts.marked = Counting


@way("torch.save", remedy="outside")
def saving(device):
    def f(x):
        torch.save(x, io.BytesIO())  # here
        return x * 2

    for call in recorded(f):
        call(ramp(device, 4))


@way("threads", remedy="outside")
def a_thread(device):
    def f(x):
        threading.Thread(target=int).start()  # here
        return x * 2

    for call in recorded(f):
        call(ramp(device, 4))


@way("process", remedy="outside")
def a_process(device):
    def f(x):
        subprocess.run([sys.executable, "-c", ""], check=True)  # here
        return x * 2

    for call in recorded(f, times=2):
        call(ramp(device, 4))


@way("last_epoch", remedy="step() outside")
def a_scheduler(device):
    net = nn.Linear(4, 1, device=device)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)

    class ByDigits(torch.optim.lr_scheduler.LRScheduler):
        def get_lr(self):
            return [group["initial_lr"] / len(str(self.last_epoch)) for group in self.optimizer.param_groups]

    schedule = ByDigits(opt)

    def step(x):  # here
        opt.zero_grad()
        loss = net(x).sum()
        loss.backward()
        opt.step()
        schedule.step()
        return loss.detach()

    for call in recorded(step, times=8):
        call(ramp(device, 4))


@way("scale", "call to call", remedy="tensor")
def a_value_that_changes(device):
    config = Config()
    f = pg.record(lambda x: x * len(config.scale), warmup=1)  # here
    for n in range(30):
        config.scale = "n" * n
        f(ramp(device, 4))


# ---------------------------------------------------------------------------------------------------
# Results


@way("StringIO", remedy="objects")
def returns_an_object(device):
    def f(x):
        result = Config()
        result.x = x * 2
        return result  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("Tagged", remedy="as_subclass(torch.Tensor)")
def returns_a_subclass(device):
    def f(x):
        return (x * 2).as_subclass(Tagged)  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("attributes", remedy="return the values")
def returns_a_tensor_with_attributes(device):
    def f(x):
        y = x * 2
        y.tag = "a"
        return y  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("leaf", remedy="requires_grad_()")
def returns_a_leaf(device):
    def f(x):
        return (x * 2).requires_grad_()  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("hook", remedy="on the result")
def returns_a_tensor_with_a_hook(device):
    def f(x):
        y = x.sin()
        y.register_hook(lambda grad: grad * 2)
        return y  # here

    for call in recorded(f):
        call(ramp(device, 4).requires_grad_()).sum().backward()


@way("meta", remedy="return its shape")
def returns_a_tensor_elsewhere(device):
    def f(x):
        return x.to("meta")  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("generator", remedy="record what it calls")
def a_generator_function(device):
    def f(x):  # here
        yield x * 2

    for call in recorded(f):
        list(call(ramp(device, 4)))


@way("coroutine", remedy="record what it calls")
def a_coroutine_function(device):
    async def f(x):  # here
        return x * 2

    for call in recorded(f):
        asyncio.run(call(ramp(device, 4)))


# ---------------------------------------------------------------------------------------------------
# What it works with


@way("iterator (batches)", remedy="outside")
def an_iterator(device):
    batches = iter([ramp(device, 4)] * 9)

    def f(x):
        return x * next(batches)  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("open file (log)", remedy="outside")
def a_file(device):
    log = io.StringIO()

    def f(x):
        log.write("a step")  # here
        return x * 2

    for call in recorded(f):
        call(ramp(device, 4))


@way("ASGD", "step count", remedy="capturable=True")
def an_optimizer_that_looks(device):
    net = nn.Linear(4, 1, device=device)
    opt = torch.optim.ASGD(net.parameters())

    def step(x):  # here
        opt.zero_grad()
        loss = net(x).sum()
        loss.backward()
        opt.step()
        return loss.detach()

    for call in recorded(step):
        call(ramp(device, 4))


@way("history", remedy="detach")
def a_tensor_with_a_history(device):
    doubled = torch.ones(4, device=device, requires_grad=True) * 2

    def f(x):
        return (x * doubled).sum()  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("torch.compile", remedy="uncompiled", only="cpu")
def compiled(device):
    inner = torch.compile(lambda x: x * 2 + 1, backend="eager")

    def f(x):
        return inner(x)  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("waits for the GPU", remedy="outside", only="cuda")
def synchronizing(device):
    def f(x):
        y = x * 2
        torch.cuda.synchronize()  # here
        return y

    for call in recorded(f):
        call(ramp(device, 4))


@way("from the GPU to the CPU", remedy="outside", only="cuda")
def copying_out(device):
    def f(x):
        return (x * 2).cpu()  # here

    for call in recorded(f):
        call(ramp(device, 4))


@way("table", "on the CPU", remedy="move it", only="cuda")
def a_tensor_on_the_cpu(device):
    table = torch.ones(())

    def f(x):
        table.add_(1)  # here
        return x * table

    for call in recorded(f):
        call(ramp(device, 4))


# ---------------------------------------------------------------------------------------------------
# Gradients


@way("create_graph=True", remedy="record what contains")
def a_second_derivative(device):
    net = pg.record(nn.Sequential(nn.Linear(4, 4, device=device), nn.Tanh()), warmup=1)
    for _ in range(4):
        x = ramp(device, 4).requires_grad_()
        y = net(x).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)  # here
        grad.sum().backward()


@way("`x.mul_(2)`", "requires a gradient", remedy="clone()")
def writes_what_requires_a_gradient(device):
    def f(x):
        x.mul_(2)  # here
        return x.sin()

    for call in recorded(f):
        call(ramp(device, 4).requires_grad_() * 1)


@way("retain_grad", remedy="before the call")
def retains_the_gradient_of_an_argument(device):
    def f(x):
        x.retain_grad()  # here
        return x.sin()

    for call in recorded(f):
        call(ramp(device, 4).requires_grad_() * 1).sum().backward()


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.y = x.sin()
        return ctx.y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.y


@way("ctx", remedy="save_for_backward")
def kept_by_itself(device):
    def f(x):  # here
        return Keeps.apply(x)

    for call in recorded(f):
        call(ramp(device, 4).requires_grad_()).sum().backward()


@way("register_multi_grad_hook", remedy="register_post_accumulate_grad_hook")
def a_hook_for_many(device):
    net = nn.Linear(4, 4, device=device)
    handle = torch.autograd.graph.register_multi_grad_hook(list(net.parameters()), lambda grads: None)
    f = pg.record(net, warmup=1)
    for _ in range(4):
        f(ramp(device, 4)).sum().backward()  # here
    handle.remove()


@way("torch.func.grad", remedy="detached")
def a_transform_whose_result_has_a_history(device):
    net = nn.Linear(4, 1, device=device)

    def f(x):
        return torch.func.grad(lambda x: net(x).sum())(x)  # here

    for call in recorded(f):
        call(ramp(device, 4))


# ---------------------------------------------------------------------------------------------------
# Functions that are marked, and exceptions


@way("Config", remedy="return new tensors")
def a_marked_function_that_returns_an_object(device):
    @pg.live
    def mark(x):
        return Config()

    def f(x):
        mark(x)  # here
        return x * 2

    for call in recorded(f):
        call(ramp(device, 4))


@way("except or finally", remedy="around the call")
def a_marked_function_in_a_try_statement(device):
    @pg.live
    def mark(x):
        return None

    def f(x):
        try:
            mark(x)  # here
        finally:
            x = x * 2
        return x

    for call in recorded(f):
        call(ramp(device, 4))


@way("index_select", "except or finally", remedy="around the call", only="cpu")
def an_index_in_a_try_statement(device):
    """After what may have had effects: else a replay is taken back there."""
    note = pg.live(lambda x: None)

    def f(x, i):
        note(x)
        try:
            return x.index_select(0, i)  # here
        except IndexError:
            return x

    for call in recorded(f):
        call(ramp(device, 4), torch.tensor([1]))


class Unheard(RuntimeError):
    pass


class FailsInACapture(nn.Module):
    """Does what only a live call can do."""

    def forward(self, x):
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise Unheard("this has not been seen before")  # here
        return x * 2


@way("fails while it is captured", '"this has not been seen before"', remedy="@pg.live")
def what_torch_has_never_said(device):
    net = FailsInACapture()
    for call in recorded(lambda x: net(x)):
        call(ramp(device, 4))


what_torch_has_never_said.marked = FailsInACapture


def said_of(program, device):
    """What was warned of while this ran."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program(device)
    gc.collect()
    return [str(w.message) for w in caught if issubclass(w.category, pg.RunsLive)]


def marked_in(program):
    """The lines of a program that are marked: ``file:line``."""
    lines, first = inspect.getsourcelines(getattr(program, "marked", program))
    return [f"{__file__}:{first + n}" for n, line in enumerate(lines) if line.rstrip().endswith("# here")]


def taken_apart(text):
    """A warning's reason, line, remedy and code."""
    found = re.fullmatch(r"(?P<name>.*?) runs live: (?P<reason>.*) at (?P<line>\S+:\d+)(, in \S+)?( \((?P<remedy>.*)\))?"
                         r" \[(?P<code>PG\d+)\]", text)  # fmt: skip
    assert found is not None, text
    return found["reason"], found["line"], found["remedy"] or "", found["code"]


@pytest.mark.parametrize(("program", "words", "remedy", "only"), WAYS)
def test_c11_each_way_to_be_refused_is_told_with_cause_line_and_remedy(device, program, words, remedy, only):
    if only and device.type != only:
        pytest.skip(f"needs {only}")
    (text,) = said_of(program, device)
    reason, line, advice, code = taken_apart(text)
    for word in words:
        if SHOWS_EXPRESSIONS or not word.startswith("`"):
            assert word in reason, text
    assert line in marked_in(program), text
    assert advice, text
    assert remedy in advice, text
    shown = {linecache.getline(__file__, int(at.rpartition(":")[2])).strip() for at in marked_in(program)}
    of_it = {known.code for known in coded.reasons() if f"{known.example}  # here" in shown}
    assert device.type == "cuda" or not of_it or code in of_it, text
    for raw in ("aten::", "RuntimeError", "NotImplementedError", "phonograph itself failed", "open an issue", "capture failed"):
        assert raw not in text


def test_c11_there_are_many_ways():
    assert len(WAYS) >= 60


def test_c11_the_first_refusal_of_a_call_is_what_is_told_whatever_is_done_about_it(device):
    """Who catches it may log it, make another exception of it, or go on: also a library, as torch's collectives do."""

    def logs_and_raises(function, *args):
        try:
            return function(*args)
        except Exception as error:
            logger.error("%s", error)
            raise ValueError("something else") from error

    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    f = pg.record(lambda x: x * logs_and_raises(torch.Tensor.item, x.sum()), fallback="error", warmup=1)
    f(ramp(device, 4))
    with pytest.raises(pg.Unrecordable, match="reads a tensor's value on the host"):
        f(ramp(device, 4))


def test_c11_a_failure_of_our_own_names_the_users_line_and_what_to_do(device, monkeypatch):
    monkeypatch.setattr(making, "record", max)  # which raises
    monkeypatch.setattr(contained.logger, "error", lambda *args, **kwargs: None)
    f = pg.record(lambda x: x * 2, warmup=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            f(ramp(device, 4))
            line = inspect.currentframe().f_lineno - 1
    (text,) = [str(w.message) for w in caught if issubclass(w.category, pg.RunsLive)]
    assert f"{__file__}:{line}" in text
    assert all(word in text for word in ("phonograph itself failed", "has run live", "report", "@pg.live", "PHONOGRAPH=off"))


def test_c19_fallback_error_tells_the_line_as_well(device):
    f = pg.record(lambda x, g: x * 2, fallback="error")
    with pytest.raises(pg.Unrecordable) as raised:
        f(ramp(device, 4), io.StringIO())
    assert f"as `g` at {__file__}:{inspect.currentframe().f_lineno - 1}" in str(raised.value)


@may_run_live
def test_c19_explain_tells_the_line_of_the_call(device):
    f = pg.record(lambda x, g: x * 2)
    f(ramp(device, 4), io.StringIO())
    line = inspect.currentframe().f_lineno - 1
    assert f"as `g` at {__file__}:{line} (" in pg.explain(f)


# ---------------------------------------------------------------------------------------------------
# The source: whatever can be refused says what to do


def refusals_in(path):
    """All places where a file makes a refusal: the line, its reason's expression, and its remedy's, if it has one."""
    kinds = {"Refusal", "NoSignature", "Unpadded", "Attached", "Unseen", "Unmarked"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
            if any(isinstance(arg, ast.Starred) for arg in node.args):
                continue  # a pair of both
            named = [keyword.value for keyword in node.keywords if keyword.arg == "remedy"]
            yield node.lineno, node.args[0], next(iter(node.args[1:2] or named), None)


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_c11_whatever_is_refused_has_a_remedy(path):
    for line, _, remedy in refusals_in(path):
        assert remedy is not None, f"{path}:{line}"
        assert not (isinstance(remedy, ast.Constant) and not remedy.value), f"{path}:{line}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_c11_no_reason_has_the_name_of_an_operator_as_it_is_inside_of_torch(path):
    """`wording.source_of(m.name)` is what people write."""
    for line, reason, _ in refusals_in(path):
        for value in (x.value for x in getattr(reason, "values", ()) if isinstance(x, ast.FormattedValue)):
            assert ast.unparse(value) not in ("m.name", "meaning.name", "func", "operator.name()"), f"{path}:{line}"


def test_c11_most_refusals_were_found():
    assert sum(len([*refusals_in(path)]) for path in FILES) > 120


# ---------------------------------------------------------------------------------------------------
# Words


@pytest.mark.parametrize(("name", "said"), [
    ("aten::_local_scalar_dense", ".item()"), ("aten::nonzero", "torch.nonzero"), ("aten::index.Tensor", "x[mask]"),
    ("aten::add_.Tensor", "Tensor.add_"), ("aten::_softmax", "torch.softmax"),
    ("aten::linalg_cholesky_ex", "torch.linalg.cholesky_ex"),
    ("aten::one_of_its_own", "aten::one_of_its_own"), ("mine::twice", "mine::twice"), ("Tensor.numpy", "Tensor.numpy"),
])  # fmt: skip
def test_c11_what_people_write_for_an_operator(name, said):
    assert operator(name) == said


def test_c11_a_long_expression_is_cut():
    def far():
        return inspect.currentframe()

    frame = far()
    code = compile("f(" + ", ".join(f"name_of_an_argument_{i}" for i in range(30)) + ")", __file__, "eval")
    assert len(excerpt(code, 0, {})) <= 60
    assert frame is not None


def test_c11_an_operator_is_named_by_the_expression_that_runs():
    said = source_of("aten::nonzero")
    assert said == ('`source_of("aten::nonzero")`' if SHOWS_EXPRESSIONS else "`torch.nonzero`")


def test_c11_arguments_are_named_as_the_function_does():
    naming = Naming(lambda x, *rest, scale=1.0: x)
    assert naming([0, 0]) == "x"
    assert naming([0, 2, "a", 0]) == "rest[1]['a'][0]"
    assert naming([1, "scale"]) == "scale"
    assert Naming(max)([0, 1]) == "argument 1"


def test_c11_what_torch_says_becomes_a_cause_and_a_remedy():
    reason, remedy = failure(RuntimeError("Cannot access storage of SparseTensorImpl"), "`x.to_sparse()`")
    assert reason.startswith("`x.to_sparse()` works with")
    assert "dense" in remedy
    assert failure(RuntimeError("something else"), "") is None


def test_c11_a_refusal_without_a_line_gets_that_of_the_call_and_is_not_changed_itself():
    refusal = Refusal("a", "b")
    told = refusal.at("train.py:3")
    assert (told.where, refusal.where) == ("train.py:3", "")
    assert told.at("other.py:4") is told
    assert str(copy.copy(told)) == "a at train.py:3 (b)"
    assert str(NoSignature("takes a file", "close it").of("as `x`")) == "takes a file as `x`"
