"""Where the random numbers of microbatches and segments come from."""
