"""`python -m evenpack.launcher.cli`: how `deepspeed --module` starts the ranks of a study."""

from evenpack.launcher.cli.app import main

main()
