"""A step played through on a clock, with what everything costs."""
