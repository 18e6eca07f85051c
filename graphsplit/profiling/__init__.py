"""Where the time of a step goes: measured, predicted, traced."""
