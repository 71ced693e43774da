"""Figures, catalog, verdicts and the book."""
