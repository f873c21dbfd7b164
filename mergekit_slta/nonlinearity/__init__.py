"""Non-linearity scores: how linear models and their submodules are in their weights."""
