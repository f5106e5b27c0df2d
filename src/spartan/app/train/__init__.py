"""Trains by recipes: data, the loop, its processes and its files."""
