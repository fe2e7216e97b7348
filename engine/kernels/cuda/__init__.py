"""Kernels for NVIDIA GPUs in Triton, which comes with every CUDA build of torch.

Nothing here is imported where the device is a CPU. A row's numbers are a function of that row alone: tiles and the
order of sums are fixed by a model's shapes, never by what else is in the batch.
"""
