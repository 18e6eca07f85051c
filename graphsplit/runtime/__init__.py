"""Run one worker's program."""
