"""``python -m fixedstate`` is the same as the ``fixedstate`` command."""

from fixedstate.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
