"""Networks built without memory: each worker makes only what it owns."""
