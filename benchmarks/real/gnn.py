"""A graph network with message passing by scatter, full batch, Adam, accuracy now and then."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from real import rivals

STEPS, ROUND = 30, 20
RIVAL = ("reduce-overhead", rivals.reduce_overhead, {})


class Data:
    def __init__(self, **things: Tensor) -> None:
        self.__dict__.update(things)

    def to(self, device: str) -> Data:
        return Data(**{name: t.to(device) for name, t in self.__dict__.items()})

    @property
    def num_nodes(self) -> int:
        return self.x.size(0)


class GCNConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin, self.bias = nn.Linear(inputs, outputs, bias=False), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        degree = torch.zeros(x.size(0), device=x.device).scatter_add_(0, target, torch.ones_like(target, dtype=x.dtype))
        weight = degree.clamp(min=1).rsqrt()[source] * degree.clamp(min=1).rsqrt()[target]
        x = self.lin(x)
        return torch.zeros_like(x).index_add_(0, target, x[source] * weight[:, None]) + self.bias


class GCN(nn.Module):
    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = GCNConv(inputs, hidden), GCNConv(hidden, classes)

    def forward(self, data: Data) -> Tensor:
        x = F.dropout(data.x, p=0.5, training=self.training)
        x = F.relu(self.conv1(x, data.edge_index))
        return self.conv2(F.dropout(x, p=0.5, training=self.training), data.edge_index).log_softmax(dim=1)


def run(device: str, record) -> Iterator[object]:
    nodes = 500
    edges = torch.randint(0, nodes, (2, 4000))
    loops = torch.arange(nodes).expand(2, nodes)
    data = Data(x=torch.randn(nodes, 64), y=torch.randint(0, 7, (nodes,)), edge_index=torch.cat([edges, loops], 1)).to(device)
    model = GCN(64, 16, 7).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    model = record(model)

    yield model, optimizer
    for epoch in range(1_000_000):
        model.train()
        optimizer.zero_grad()
        out = model(data)
        loss = F.nll_loss(out, data.y)
        loss.backward()
        optimizer.step()
        if epoch % 10 == 0:
            model.eval()
            with torch.no_grad():
                accuracy = (model(data).argmax(1) == data.y).float().mean().item()
            print(f"Epoch: {epoch:03d}, Loss: {loss.item():.4f}, Acc: {accuracy:.4f} of {data.num_nodes}")
        yield loss, out
