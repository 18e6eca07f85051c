"""The messages of the control plane, and the bytes that they travel as."""
