"""`python -m halflife.cli.lm_eval`: the command `lm_eval`, which also knows `--model halflife` and our tasks."""

from __future__ import annotations

import sys

from halflife.cli.lm_eval import TASKS, register
from halflife.extras import require


def main() -> None:
    """Run the harness with the arguments of this process. The folder of our tasks is included by default."""
    arguments = sys.argv[1:]
    if arguments == ["--tasks-folder"]:
        print(TASKS)
        return
    try:
        require("python -m halflife.cli.lm_eval", "lm_eval")
    except ModuleNotFoundError as error:
        print(f"halflife: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    from lm_eval.__main__ import cli_evaluate

    register()
    if arguments and not any(each.partition("=")[0] == "--include_path" for each in arguments):
        sys.argv += ["--include_path", str(TASKS)]
    cli_evaluate()


if __name__ == "__main__":
    main()
