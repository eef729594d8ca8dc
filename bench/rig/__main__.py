"""`python -m bench.rig`: look at a rig, or clean up after one."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Table

from bench.rig import Host, Rig, RigError, RigUp, leftovers, missing
from bench.rig.traffic import cpu_share, mbit_per_s

_RATES = (2.0, 10.0, 50.0, 200.0, 1000.0)
_SHARES = (0.1, 0.25, 0.5, 1.0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.rig", description="The rig that benchmarks run on.")
    parser.add_argument("--show", action="store_true", help="bring one up; print asked and measured rates and shares")
    parser.add_argument("--clean", action="store_true", help="remove what rigs of killed processes left behind")
    arguments = parser.parse_args()
    console = Console()
    try:
        if arguments.clean:
            if reason := missing():
                raise RigError(reason)
            names = leftovers.clean()
            console.print("\n".join([f"removed {name}" for name in names]) or "nothing is left over")
        elif arguments.show:
            show(console)
        else:
            parser.print_help()
    except RigError as error:
        print(f"RigError: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


def show(console: Console) -> None:
    rig = Rig(storage=(Host("storage", cores=(0,)),), trainers=(Host("trainer", cores=(1,)),))
    with RigUp(rig) as up:
        table = Table(title="the trainer's link: payload, Mbit/s", title_justify="left")
        for title in ("asked", "down, measured", "up, measured"):
            table.add_column(title, justify="right")
        for rate in _RATES:
            with console.status(f"measuring {rate:g} Mbit/s"):
                up.set_rate("trainer", rate)
                # Long at low rates: one lost frame holds back all that came after it.
                seconds = 5.0 if rate < 10 else 2.0
                down = mbit_per_s(up, "storage", "trainer", seconds=seconds)
                away = mbit_per_s(up, "trainer", "storage", seconds=seconds)
            table.add_row(f"{rate:g}", f"{down:.2f} ({down / rate:.0%})", f"{away:.2f} ({away / rate:.0%})")
        console.print(table)
        table = Table(title="CPU of storage, cores", title_justify="left")
        for title in ("asked", "measured"):
            table.add_column(title, justify="right")
        for share in _SHARES:
            with console.status(f"measuring a CPU share of {share:g}"):
                up.set_cpu("storage", share)
                got = cpu_share(up, "storage")
            table.add_row(f"{share:g}", f"{got:.3f} ({got / share:.0%})")
        console.print(table)


if __name__ == "__main__":
    sys.exit(main())
