"""`python -m trainer_hooks.audit LOG`: proves a run's event log, or says what is wrong with it.

Exit status: 0 the log proves the run; 1 it does not, or it is damaged; 2 it cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from trainer_hooks.cells.audit import audit
from trainer_hooks.cells.event_log import LogCorrupt, is_torn, read_events


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer_hooks.audit", description=__doc__.splitlines()[0])
    parser.add_argument("log", help="event log of a run (JSONL)")
    parser.add_argument("--unfinished", action="store_true", help="the run still goes on, or was killed")
    parser.add_argument("--shrinks", type=int, help="exactly so many members must have left a quorum")
    parser.add_argument("--heals", type=int, help="exactly so many cells must have been healed by a peer")
    options = parser.parse_args(argv)
    try:
        torn = is_torn(options.log)
        events = read_events(options.log)
    except LogCorrupt as damage:
        print(f"DAMAGED  {damage}")
        return 1
    except OSError as cause:
        print(f"{options.log}: {cause.strerror or cause}", file=sys.stderr)
        return 2
    report = audit(events, unfinished=options.unfinished, shrinks=options.shrinks, heals=options.heals)
    for problem in report.problems:
        print(f"PROBLEM  {problem}")
    if torn:
        print("note: the last line was cut off while it was written, and was ignored")
    print("  ".join(f"{name}={count}" for name, count in report.counts.items()))
    print(f"{options.log}: {'clean' if report.clean else f'{len(report.problems)} problem(s)'}")
    return 0 if report.clean else 1


if __name__ == "__main__":
    sys.exit(main())
