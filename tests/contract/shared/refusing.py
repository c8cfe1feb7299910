"""C11-C13: refusing. What cannot be recorded runs live, is right, and says why; nothing is left behind by a recording
that failed; what the function raises reaches the caller as it is."""


def item(x):
    return x * x.sum().item()
