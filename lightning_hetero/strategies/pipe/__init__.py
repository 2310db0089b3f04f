"""hetero_pipe: a model cut into stages, one or several on each rank, and the steps that run through them."""
