"""DPLR (RWKV-7) as Triton kernels: one that reduces chunks, a walk for both directions, and one of gradients."""
