"""Optimizers of one replica: Dion, Muon, and another one for what is no matrix."""
