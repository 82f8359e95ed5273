"""Studies of training runs: arms, seeds and phases of a study file become runs, which are trained one by one."""
