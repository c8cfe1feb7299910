"""The CUDA device: CUDA graphs in one private memory pool."""
