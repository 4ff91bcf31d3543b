"""Files of rows in the run directory: metrics, steps, recorded tokens, evaluations; their keys, and reading them."""
