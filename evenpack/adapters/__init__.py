"""The batches of `evenpack.Loader` in trainers of others: one module for each, which imports that trainer alone."""
