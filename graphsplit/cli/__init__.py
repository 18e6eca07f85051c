"""The command line: ``graphsplit run`` starts a job on this machine."""
