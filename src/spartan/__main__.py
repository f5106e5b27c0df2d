"""`python -m spartan` is `spartan`."""

from spartan.app.cli import main

if __name__ == "__main__":
    main()
