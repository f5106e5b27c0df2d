"""The application: recipes, data, models, the training loop and its files."""
