"""What the rows of a run say to a person: progress, and whether the training goes wrong."""
