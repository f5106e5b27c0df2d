"""The application: the command line, recipes, training runs and reports."""
