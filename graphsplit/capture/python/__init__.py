"""The Python values around a captured step, and what capture refuses of them."""
