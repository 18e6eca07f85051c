"""The public side of training: Model, callbacks, metrics."""
