"""mergekit's face of the package: the merge methods, their registration, and the merge itself."""
