"""The version of the package, where every room may read it."""

VERSION = "0.1.0"
