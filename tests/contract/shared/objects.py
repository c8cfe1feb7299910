"""C3, C4, C7, C9: objects of people's own classes, functions, and dictionaries with any keys, as arguments and as results."""


class Batch:
    """An ordinary object."""

    def __init__(self, x, n):
        self.x = x
        self.n = n
