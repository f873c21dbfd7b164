"""The linear algebra that the methods share: Gram matrices, and symmetric systems that are solved in float64."""
