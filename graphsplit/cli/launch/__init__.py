"""Starts the processes of one job on this machine, watches over them, and says how they ended."""
