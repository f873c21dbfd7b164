"""The linear algebra that ``featcal`` and ``actmat`` share: Gram matrices, and systems of equations made of them."""
