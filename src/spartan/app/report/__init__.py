"""Writes reports: a run, or several, as one HTML page that needs nothing but a browser."""
