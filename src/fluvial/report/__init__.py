"""One self-contained HTML page about any number of runs."""

from fluvial.report.page import write_report_page

__all__ = ["write_report_page"]
