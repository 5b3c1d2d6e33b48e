"""`python -m train`, the program `train` for a Python that is named. Launchers run the installed program."""

from train.cli import main

if __name__ == "__main__":
    main()
