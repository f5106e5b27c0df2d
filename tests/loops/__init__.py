"""Other people's training loops, written as their users write them: with lines of ours only where the sparsifier is made."""
