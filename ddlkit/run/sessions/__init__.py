"""Which measurements are made, in which order, and how what they give is kept."""
