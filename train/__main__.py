"""`python -m train`, which `torchrun -m train` runs in each of its processes."""

from train.cli import main

if __name__ == "__main__":
    main()
