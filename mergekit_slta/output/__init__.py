"""A merge on disk: its model card, and the files beside the weights."""
