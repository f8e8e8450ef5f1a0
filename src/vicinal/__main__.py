"""`python -m vicinal`: the command, where it is not on the path."""

from vicinal.cli import main

if __name__ == "__main__":  # workers of a run import this module too
    main()
