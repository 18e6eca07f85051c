"""Cut a placed graph into segments and edges."""
