"""Values as bytes, for files and for other workers. What is read is bounded, never unpickled."""
