"""The papers' figures, one module per paper and subject."""
