"""Prepares the checks of signatures where ranks are forked from, so that not each of them has to."""

import gc

gc.disable()  # what is imported here stays to the end, and searching it again and again takes a second of six

import checked_types  # noqa: E402

import evenpack.adapters.trainer  # noqa: E402 - two seconds, which each of the ranks that need it would take
import evenpack.engine.train  # noqa: E402
import evenpack.launcher.cli.app  # noqa: E402, F401 - with the former, what nearly all ranks import

checked_types.prepare()
gc.freeze()
gc.enable()
