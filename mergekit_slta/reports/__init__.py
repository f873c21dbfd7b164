"""HTML pages with figures and tables."""
