"""Answers problems of single weights and of blocks on a CPU: pieces that stay in the cache go through all operations
before the next.

Everything is arithmetic on floats: torch's operations on bools take up to seven times as long as a product (25.5M
weights on 2 cores: a product 2 ms, a sigmoid 5, a comparison into floats 1.4, into bools 6, `where` 12, `nonzero` 11).
A new tensor of all weights takes 35 ms before anything is in it, since its pages are: whatever can stay in place does.

The threshold and τ start from the last step's. The former is exact wherever the search starts; the latter is saved with
the former, so that a resumed run goes on as if it had never stopped.

Units of several weights are few, and what is said of them is left to plain torch; the weights that they are read from and
written to go by strips of whole rows (`strips`, `unit_sums`, `units`).
"""
