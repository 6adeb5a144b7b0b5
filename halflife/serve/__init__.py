"""A server of text: one model, many clients, batched steps, and states instead of key-value caches."""
