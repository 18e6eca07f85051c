"""Jobs on a network that fails: hosts are network namespaces, joined by a switch of our own."""
