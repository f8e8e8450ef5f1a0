"""Records to tables, plots and one page."""
