"""A model's own answers to prompts, as calibration data."""
