"""Submodule Linearity for Task Arithmetic: from feature deltas to merging weights. Begin with grams.py."""
