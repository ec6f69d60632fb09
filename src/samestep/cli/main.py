"""The `samestep` command: find the verb, run its module. Imports no torch."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from samestep import __version__
from samestep.errors import SamestepError

__all__ = ["VERBS", "main"]

VERBS = {
    "train": "train a built-in task or your own, on any number of ranks in any precision",
    "launch": "run a script on N ranks",
    "doctor": "say what works on this machine",
}

_EXAMPLES = """\
examples:
  samestep train digits --nproc 2 --precision bf16
  samestep train my_task.py:MyTask --epochs 3
  samestep launch -n 2 train.py --lr 0.1
  samestep doctor
"""


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong flag or verb is answered with the nearest right one."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with 2."""
        known = [option for action in self._actions for option in action.option_strings]
        known += [choice for action in self._actions for choice in (action.choices or ())]
        if "argument " in message or "unrecognized" in message or "invalid choice" in message:
            words = [word.strip("'\",") for word in message.split()]
            wrong = [word.split("=")[0] for word in words if word not in known and word.split("=")[0] not in known]
            near = [match for word in wrong for match in difflib.get_close_matches(word, known, n=1, cutoff=0.7)]
            if near:
                message += f"; did you mean {near[0]}?"
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser(verb: str | None) -> Parser:
    parser = Parser(
        prog="samestep",
        description="Write the loop for one device in fp32; run it on N ranks in bf16 or fp16; get the same training.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"samestep {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs", required=True, parser_class=Parser)
    for name, help_text in VERBS.items():
        if verb is not None and name != verb:
            verbs.add_parser(name, help=help_text)
            continue
        if verb is None:
            verbs.add_parser(name, help=help_text)
            continue
        module = importlib.import_module(f"samestep.cli.{name}")
        sub = verbs.add_parser(
            name,
            help=help_text,
            description=module.__doc__,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code: 0, 1 for an error with one line that says what to do, 2 for wrong usage."""
    argv = list(sys.argv[1:] if argv is None else argv)
    verb = next((word for word in argv if not word.startswith("-")), None)
    arguments = _parser(verb if verb in VERBS else None).parse_args(argv)
    try:
        return int(importlib.import_module(f"samestep.cli.{arguments.verb}").run(arguments))
    except SamestepError as e:
        if os.environ.get("SAMESTEP_TRACEBACK"):
            raise
        print(f"samestep: error: {e}", *getattr(e, "__notes__", []), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) went away; Python must not complain while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
