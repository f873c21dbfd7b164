"""The linear algebra that methods share: Gram matrices, and systems of equations made of them."""
