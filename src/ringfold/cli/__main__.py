"""`python -m ringfold.cli` is the `ringfold` command, also where no script directory is on the path."""

from ringfold.cli import main

main()
