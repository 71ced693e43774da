"""Zhong and Qu: resource sharing between computation and communication."""
