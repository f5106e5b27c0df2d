"""What `shrink` knows about the operations of a graph: a file for each kind."""
