"""Programs: instruction assembly, the NKI-shaped kernel language, its compiler, the kernels."""
