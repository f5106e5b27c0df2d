"""The commands of the command line that are not about training."""
