"""A CUDA device that does not exist: whole steps on fake tensors, without a GPU (README.md)."""
