"""The version of evenpack, where every package may read it."""

VERSION = "0.1.0"
