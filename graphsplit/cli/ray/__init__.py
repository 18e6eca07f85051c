"""Jobs on a Ray cluster: an actor for each worker, with an agent as SSH starts them."""
