"""Writes reports: a run, or several, as one HTML page that needs nothing but a browser."""

from spartan.app.report.page import write_report

__all__ = ["write_report"]
