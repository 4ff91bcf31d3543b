"""What the rows of a run say to a person: progress, the curve, and whether the training goes wrong."""
