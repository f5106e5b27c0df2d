"""`python -m spartan` is `spartan`."""

from spartan.cli import main

if __name__ == "__main__":
    main()
