"""Start ranks, watch over them, and let them talk: one job is one program on every rank."""
