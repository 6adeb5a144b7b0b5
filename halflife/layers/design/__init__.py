"""The design-space block, and the layers that are rows of its options."""
