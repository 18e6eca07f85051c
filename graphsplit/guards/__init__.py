"""The Python values that code has read, which a captured graph depends on beside its inputs."""
