"""`python -m spartan_sparsity` is `spartan`, also where another package has taken that name."""

from spartan_sparsity import main

if __name__ == "__main__":
    main()
