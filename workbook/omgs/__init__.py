"""Shi et al., INFOCOM 2020: merged gradient sparsification."""
