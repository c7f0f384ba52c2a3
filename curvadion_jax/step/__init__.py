"""One step of all replicas: the decision, every replica's own step, and the sync."""
