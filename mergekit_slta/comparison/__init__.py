"""How models compare on held-out records: each model is run once, one layer at a time, and its scores are kept."""
