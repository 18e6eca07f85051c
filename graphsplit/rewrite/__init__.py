"""From a graph to another one with the same bits: branches taken apart, memory in versions."""
