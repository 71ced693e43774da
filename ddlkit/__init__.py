"""The cost of communication in distributed deep learning: measure, fit, predict, validate."""

__version__ = "0.1.0"
