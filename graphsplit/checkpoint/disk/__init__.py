"""One save on one machine's disk."""
