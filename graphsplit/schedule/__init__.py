"""Orders of compute, and the proof that programs cannot deadlock."""
