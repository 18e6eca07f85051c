"""The workers of a script's own loop: who has a value, what they ask and tell each other."""
