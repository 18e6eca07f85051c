"""The user's optimizers, each worker's over what it owns."""
