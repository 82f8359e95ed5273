"""`evenpack new`: a run file for one's own data, made of a shipped one."""
