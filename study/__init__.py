"""What is made of an experiment's rows: statistics, tables, figures, the report. Also
study/compare.py, for numbers of any project, and the page of a text."""
