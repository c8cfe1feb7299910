import torch
from torch.utils._python_dispatch import TorchDispatchMode
class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
torch.manual_seed(0)
z = torch.randn(5, 4, dtype=torch.complex64)
def residual(p): return (z @ p @ z - z).abs().max().item()
p = torch.linalg.pinv(z)
with Plain(): q = torch.linalg.pinv(z)
print("pinv", residual(p), residual(q))
for f in (torch.linalg.pinv, lambda z: torch.linalg.pinv(z, hermitian=False), torch.pinverse):
    with Plain(): print(residual(f(z)))
h = z[:4] + z[:4].mH
with Plain(): q = torch.linalg.pinv(h, hermitian=True)
print("herm", (h@q@h-h).abs().max())
x = torch.eye(5)
out = torch.zeros((), dtype=torch.int64); torch.linalg.matrix_rank(x, out=out); print("rank", out)
out = torch.zeros((), dtype=torch.int64)
with Plain(): r = torch.linalg.matrix_rank(x, out=out)
print("rank", out, r)
for o in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
    for kw in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        w = torch.nn.Parameter(torch.ones(3)); opt = o([w], lr=0.1, **kw); w.grad = torch.ones(3)
        a = w._version; opt.step(); print(o.__name__, kw, w._version - a, w[0].item())
torch.manual_seed(0)
for shape in ((8, 3, 64), (4,7,33), (16, 196, 768)):
    x = torch.randn(shape[0], shape[2], shape[1]).transpose(1, 2); lin = torch.nn.Linear(shape[2], 96)
    with torch.inference_mode():
        a = lin(x)
        with Plain(): b = lin(x)
    c = lin(x)
    with Plain(): d=lin(x)
    print("linear", torch.equal(a, b), (a-b).abs().max().item(), "grad", torch.equal(a,c), torch.equal(c,d))
m = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2))
m.note = "x"; print("jit", "note" in vars(m), type(m).__name__)
