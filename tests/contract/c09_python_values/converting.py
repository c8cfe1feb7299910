"""A module as libraries have them: schedules that make floats of the count of steps."""

from torch.optim.lr_scheduler import LambdaLR


def linear(optimizer, warm_up, steps):
    def rate(step: int) -> float:
        if step < warm_up:
            return float(step) / float(max(1, warm_up))
        return max(0.0, float(steps - step) / float(max(1, steps - warm_up)))

    return LambdaLR(optimizer, rate)


def scaled_by(state):
    def f(x):
        state.n += 1
        return x * (float(state.n) / 8) * float(state.flag)

    return f


def metrics(x):
    return {"loss": float(x.sum()), "whole": float(x.long().sum())}


def hits(x):
    return int(x.sum()) + int((x > 2).sum())


def converted_again(x):
    return float(x.sum().item()), int(x.long().sum().item()), int(x.mean().item() / 2)
