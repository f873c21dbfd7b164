"""One decoder layer: how to run it, and how it splits into branches, heads and linear maps."""
