"""A merge on disk: its manifest, its model card, the files beside the weights, and how it is verified and published."""
