"""The base of studies of training runs: arms, seeds and phases of a study file become runs, trained one by one."""
