"""`python -m trainer_hooks.trainer`: options to a run, and its errors to exit states.

0: the run finished. 2: options, files or data are wrong (one line each, nothing was started). 1: the run failed.
130: interrupted; everything was ended.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # else every worker would run uv again


def main(argv: Sequence[str] | None = None) -> int:
    from trainer_hooks.trainer.options import parse_args, validate

    args = parse_args(argv)
    try:
        from trainer_hooks.trainer.setup import prepare

        validate(args)
        job = prepare(args)
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        message = error.args[0] if isinstance(error, KeyError) else str(error)
        print("\n".join(f"error: {line}" for line in str(message).splitlines()), file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return job.run()


if __name__ == "__main__":
    sys.exit(main())
