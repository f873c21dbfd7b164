"""What can be known to be wrong with a recipe before any weights are read."""
