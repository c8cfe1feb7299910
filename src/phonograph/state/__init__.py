"""State of the process that a call reads or moves: random generators, optimizers' steps."""
