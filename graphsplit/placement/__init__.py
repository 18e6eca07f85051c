"""Say, and decide, which worker runs what."""
