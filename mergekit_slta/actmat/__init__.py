"""Linear maps by least squares, with the task vectors' Gram matrices in place of the inputs'."""
