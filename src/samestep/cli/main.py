"""The `samestep` command: find the verb, run its module. Imports no torch."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

from samestep import __version__
from samestep.errors import SamestepError

__all__ = ["VERBS", "main", "one_line"]

VERBS: dict[str, tuple[str, str]] = {
    "train": ("samestep.cli.train", "train a built-in task or your own, on any number of ranks in any precision"),
    "launch": ("samestep.cli.launch", "run a Python script on several ranks"),
    "plan": ("samestep.cli.plan", "say what a training will do, before it does it"),
    "diff": ("samestep.cli.diff", "compare two runs: the first window that differs, in what, how far, and why"),
    "report": ("samestep.cli.report", "write one HTML file that shows one or several runs"),
    "watch": ("samestep.cli.watch", "follow a running job in the terminal"),
    "ckpt": ("samestep.cli.ckpt", "look at checkpoints, verify, compare, export, import and prune them"),
    "doctor": ("samestep.cli.doctor", "say what works on this machine, and what to install or change"),
}
"""Each verb's module and one-line help. A module has EXAMPLES, `add_arguments(parser)` and `run(arguments) -> int`."""

_DESCRIPTION = "Write the loop for one device in fp32; run it on N ranks in bf16 or fp16; get the same training."
_EXAMPLES = """\
examples:
  samestep train digits --nproc 2 --precision bf16
  samestep launch -n 2 train.py --lr 0.1
  samestep doctor

`samestep VERB --help` has each verb's flags. Exit codes: 0 done, 1 an error said in one line, 2 wrong usage;
diff: 0 the same, 1 different, 2 an error. SAMESTEP_TRACEBACK=1 shows an error's whole traceback.
"""


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong flag or choice is answered with the nearest right one."""

    def __init__(self, prog: str, description: str | None, epilog: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._given: list[str] = []

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments; exits with 2 after one line about what is wrong."""
        self._given = list(argv)
        arguments, unknown = self.parse_known_args(self._given)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message with the nearest right word, and exit with 2."""
        options = [name for action in self._actions for name in action.option_strings]
        choices = [str(choice) for action in self._actions for choice in action.choices or ()]
        wrong_choice = re.search(r"invalid choice: '?([^' ]*)", message)
        if wrong_choice:
            hint = _nearest(wrong_choice[1], choices)
        else:  # also where argparse complains of something else first, as of the required flag that was misspelt
            words = [word.split("=")[0] for word in self._given if word.startswith("-")]
            hint = next((near for word in words if word not in options and (near := _nearest(word, options))), "")
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}{hint}\n")


def _nearest(word: str, right: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(right), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _top_parser() -> Parser:
    verbs = "\n".join(f"  {name:<10}{help_text}" for name, (_, help_text) in VERBS.items())
    parser = Parser("samestep", _DESCRIPTION, f"verbs:\n{verbs}\n\n{_EXAMPLES}")
    parser.add_argument("--version", action="version", version=f"samestep {__version__}")
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help="one of those below")
    return parser


def one_line(text: object) -> str:
    """For a terminal: what a file's names hold cannot break the line, move the cursor or change colours."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text).replace("\n", " "))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code: 0, 1 for an error with one line that says what to do, 2 for wrong usage."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # All that follows the verb is the verb's, so that no flag of it can be taken for one of the command itself.
    verb = str(_top_parser().parse(argv[:1]).verb)
    try:
        module = importlib.import_module(VERBS[verb][0])
        parser = Parser(f"samestep {verb}", module.__doc__, module.EXAMPLES)
        module.add_arguments(parser)
        code = int(module.run(parser.parse(argv[1:])))
        sys.stdout.flush()
        return code
    except SamestepError as e:
        if os.environ.get("SAMESTEP_TRACEBACK") == "1":
            raise
        if getattr(e, "follows", False):
            return 1
        text = " ".join(str(part).strip() for part in (e, *getattr(e, "__notes__", ())))
        print("samestep: error:", one_line(text), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) went away; Python must not complain while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
