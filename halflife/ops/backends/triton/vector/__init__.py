"""Linear attention with a vector decay, as Triton kernels of single chunks and walks over segments."""
