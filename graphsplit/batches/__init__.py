"""What a batch looks like, and how it becomes microbatches."""
