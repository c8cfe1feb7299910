"""The order of a graph's nodes: which must wait for which, a proof that they do, lanes, and memory. Arithmetic alone."""
