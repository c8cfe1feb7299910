#!/usr/bin/env bash
# torch 2.14.1, CPU. A torch.distributions.Categorical that was sampled from in inference mode cannot be differentiated afterwards:
# sample() has worked out and kept its probabilities, as an inference tensor. Sampled under no_grad it can.
# Seen: entropy() of it raises "Inference tensors cannot be saved for backward"; after no_grad its gradient is right.
. "$(dirname "$0")/environment" torch==2.14.1
python - <<'PY'
import torch


def sampled(within):
    logits = torch.zeros(3, requires_grad=True)
    policy = torch.distributions.Categorical(logits=logits)
    with within():
        policy.sample()
    try:
        policy.entropy().backward()
    except RuntimeError as e:
        return str(e).partition(".")[0]
    return logits.grad.abs().max().item() < 1e-6


quiet, inference = sampled(torch.no_grad), sampled(torch.inference_mode)
print("under no_grad:", quiet, "| in inference mode:", inference)
assert quiet is True
assert inference == "Inference tensors cannot be saved for backward"
PY
