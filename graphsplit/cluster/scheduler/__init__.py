"""The scheduler of a job: who takes part, which generation runs, and how it ends."""
