"""Who reads a loader, and what the other workers learn of its batches."""
