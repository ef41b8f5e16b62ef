"""``python -m foredraft``: the command line."""

from foredraft.cli.main import main

if __name__ == "__main__":
    main()
