"""A model on disk or on the Hub: its configuration, file headers, tensors and adapters."""
