"""Linear maps by least squares without data: the task vectors' Gram matrices stand in for the inputs'."""
