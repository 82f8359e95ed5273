"""Compares ways to chunk documents into rows and their effect on a model: concat, padding, atoms and alternatives."""
