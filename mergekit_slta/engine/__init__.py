"""Hidden states through the layers, one layer at a time, resumable and shared by processes; knows no method."""
