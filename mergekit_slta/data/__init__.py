"""Calibration data: from a file or a dataset to token ids."""
