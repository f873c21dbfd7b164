"""``python -m mergekit_slta``, and with it ``torchrun -m mergekit_slta``: the command line."""

from mergekit_slta.cli.commands import main

if __name__ == "__main__":
    main()
