"""What non-negative least squares leaves over, by residual weight."""
