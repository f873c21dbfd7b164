"""The merge methods as mergekit runs them: one file per method, and the one registration."""
