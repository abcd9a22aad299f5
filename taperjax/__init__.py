"""taperjax: transformers whose normalization tapers away and folds."""
