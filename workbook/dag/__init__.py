"""Shi et al., 2018: a DAG model of synchronous SGD."""
