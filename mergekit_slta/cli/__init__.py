"""The command `mergekit-slta`: it parses arguments, calls the Python API and prints."""
