"""Effects of forward on the network's tensors and attributes besides reading them."""
