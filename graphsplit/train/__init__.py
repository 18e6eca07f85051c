"""What users train with: Model, callbacks, metrics."""
