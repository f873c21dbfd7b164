"""Superpose Features from Task Matrices: the mathematics of the data-free merge of singular features."""
