"""How merged models do on held-out records: each model is run once, one layer at a time."""
