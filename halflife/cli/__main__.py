"""`python -m halflife.cli`: the command without its installation."""

from halflife.cli import main

if __name__ == "__main__":
    main()
