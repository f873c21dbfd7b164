"""A recipe, and what it names: settings, models, tokenizers and calibration samples, opened once."""
