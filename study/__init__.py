"""What is made of an experiment's rows: statistics, tables, figures, the report. Also trials on a
trained model."""
