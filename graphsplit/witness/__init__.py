"""Notes what a Model computes, where ``graphsplit check`` asks for it; else nothing."""
