"""``python -m penstock.bench.report``."""

from penstock.bench.report import main

if __name__ == "__main__":
    main()
