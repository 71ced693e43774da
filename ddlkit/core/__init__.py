"""Cost models, planning and simulation: pure numpy, no torch, no files."""
