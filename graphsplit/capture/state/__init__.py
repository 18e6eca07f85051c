"""What forward does with the network's tensors and attributes besides reading them."""
