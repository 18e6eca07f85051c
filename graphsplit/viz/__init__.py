"""Pictures and tables of timelines."""
