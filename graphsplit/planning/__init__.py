"""From a network and a batch's signature to a plan that all workers agree on."""
