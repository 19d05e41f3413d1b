"""Tables, figures and a page of many runs."""

from gcfed.reporting.build import write_report

__all__ = ["write_report"]
