"""The system half: the loops of a run, the step from batch to weights, checkpoints."""
