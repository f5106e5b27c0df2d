"""The paper's tables and figures, each made again from this code: `spartan paper`."""
