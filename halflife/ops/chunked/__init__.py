"""What the chunked forms in plain torch share: layout, decays, and the walk over chunks."""
