"""Prepares the checks of signatures where ranks are forked from, so that not each of them has to."""

import checked_types

import evenpack.engine.train
import evenpack.launcher.cli.app  # noqa: F401 - with the former, what nearly all ranks import

checked_types.prepare()
