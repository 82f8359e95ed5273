"""Entry point `python -m evenpack.launcher.cli`, by which `deepspeed --module` starts the ranks of a study."""

from evenpack.launcher.cli.app import main

main()
