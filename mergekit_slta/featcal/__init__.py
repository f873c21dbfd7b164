"""Every linear map by least squares on the experts' features. Begin with merge.py."""
