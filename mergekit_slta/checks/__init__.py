"""Checks of a recipe before any weights are read."""
