"""A network under a script's own training loop: ``gs.distribute``."""
