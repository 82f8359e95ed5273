"""Distributed pretraining on DeepSpeed: equal packs for every GPU, nearly no padding, no document sees another."""

__version__ = "0.1.0"
