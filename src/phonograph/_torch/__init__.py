"""Every private part of PyTorch that phonograph uses. Each is looked up by name (`hasattr`), here and nowhere else."""
