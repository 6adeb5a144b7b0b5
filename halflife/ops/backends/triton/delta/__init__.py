"""The delta rule, and GateRank on it, as Triton kernels that walk over segments with the state in registers."""
