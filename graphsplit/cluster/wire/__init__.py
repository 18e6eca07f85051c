"""What the scheduler, its workers and its visitors say to each other."""
