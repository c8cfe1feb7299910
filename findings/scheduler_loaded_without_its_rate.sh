#!/usr/bin/env bash
# torch 2.14.1, CPU. load_state_dict of a learning-rate scheduler leaves the optimizer's rate as it was: get_last_lr() says the
# loaded one, and the next step is taken with the other, if the optimizer's state is not loaded as well.
# Seen: get_last_lr() [0.25], the optimizer's rate 1.0, and a step that moves by 1.0.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch


def made():
    w = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([w], lr=1.0)
    return w, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


_, optimizer, scheduler = made()
for _ in range(2):
    optimizer.step()
    scheduler.step()
w, resumed, loaded = made()
loaded.load_state_dict(scheduler.state_dict())
w.grad = torch.ones(1)
resumed.step()
print("says:", loaded.get_last_lr(), "has:", resumed.param_groups[0]["lr"], "moved by:", -w.item())
assert loaded.get_last_lr() == [0.25] == [optimizer.param_groups[0]["lr"]]
assert resumed.param_groups[0]["lr"] == 1.0 == -w.item()
PY
