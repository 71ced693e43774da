"""Everything that needs torch, a clock or root."""
