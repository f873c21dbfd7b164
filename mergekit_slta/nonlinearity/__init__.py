"""How linear models and their submodules are in their weights."""
