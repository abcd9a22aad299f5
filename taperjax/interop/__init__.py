"""Other people's model files, in and out."""
