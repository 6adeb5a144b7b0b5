"""The chunk-parallel forms in plain PyTorch: how tokens are cut into chunks, and how decays weigh their products."""
