"""The torch engine on NVIDIA GPUs: the same stages as on a CPU, defined by transformers, computed by libraries' kernels.

Weights and KV lie in the pool's arena at addresses that stay, so a parked model's CUDA graphs are good again when it wakes.
Nothing between a step's arrival and its end waits for the GPU: a step can be enqueued while the one before it runs, and uses the
token which that one samples without the host having seen it.
"""
