"""``python -m moesim`` is the same as ``moesim``."""

from moesim.cli.main import main

if __name__ == "__main__":
    main()
