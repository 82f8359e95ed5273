"""Studies the residual of non-negative least squares by residual weight."""
