"""``penstock`` and ``python -m penstock``: the command line, which handles signals before it loads anything else."""

import sys

from penstock.base.interrupts import install


def main() -> int:
    install(own_process=True)
    from penstock.cli.main import main as command_line

    return command_line()


if __name__ == "__main__":
    sys.exit(main())
