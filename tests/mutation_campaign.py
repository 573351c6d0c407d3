"""Does the suite see faults? Plants those of `tests/mutants/*.toml`, one at a time, each into a copy of the tree.

    python tests/mutation_campaign.py                     every fault, the tests that it names
    python tests/mutation_campaign.py --only ID           one fault
    python tests/mutation_campaign.py --collect           every test that sees it, to find tests that say the same
    PYTEST_ADDOPTS='-m ""' python tests/mutation_campaign.py tests/mutants/nightly/*.toml   those that only nights see

A fault is a table `[[mutant]]`: `id`; `file`, from the root; `old`, a text that stands there exactly once; `new`
in its place; `why`, what is wrong then; `tests`, the files or tests that should see it, likeliest first.

Prints a table in Markdown and exits with 1 if a fault survived or could not be planted. A test counts only if it passes
in a copy without the fault; no end within `--timeout` counts as seen.
"""

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
LISTS = ROOT / "tests" / "mutants"
NOT_COPIED = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")


class NotPlanted(Exception):
    """A fault that cannot be planted as it is described, or of which nothing is known."""


@cache
def _meaning(source):
    return ast.dump(ast.parse(source))


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: one text of one file in the place of another."""

    id: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str

    def planted(self, source):
        """The text of the file with the fault; raises `NotPlanted` if it does not fit, or is the same or no Python."""
        if source.count(self.old) != 1:
            raise NotPlanted(f"{self.id}: {self.file} holds the text {source.count(self.old)} times, not once")
        changed = source.replace(self.old, self.new)
        try:
            if ast.dump(ast.parse(changed)) == _meaning(source):
                raise NotPlanted(f"{self.id}: {self.file} means the same with the fault")
        except SyntaxError as error:
            raise NotPlanted(f"{self.id}: {self.file} is no Python with the fault: {error}") from error
        return changed


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one fault: the tests that failed, in order, and whether they did not end. `trouble`: why nothing is known."""

    mutant: Mutant
    killers: tuple[str, ...] = ()
    hung: bool = False
    trouble: str = ""
    seconds: float = 0.0

    @property
    def seen(self):
        return not self.trouble and (self.hung or bool(self.killers))

    def row(self):
        what = self.trouble or "<br>".join([*self.killers, *(["hang"] if self.hung else [])]) or "**SURVIVED**"
        return f"| {self.mutant.id} | {self.mutant.why} | {what} | {self.seconds:.0f} |"


def load(paths):
    """The faults of some lists; raises `NotPlanted` for a key that is missing, unknown or empty, or an id twice."""
    mutants = []
    for name, table in ((each.name, table) for each in paths for table in tomllib.loads(each.read_text())["mutant"]):
        empty = [key for key, value in table.items() if not value and key != "new"]
        if empty or set(table) != {field.name for field in fields(Mutant)} or not isinstance(table["tests"], list):
            raise NotPlanted(f"{name}: {table.get('id', 'a mutant')} has the keys {', '.join(table)}, empty: {empty}")
        mutants.append(Mutant(**table | {"tests": tuple(table["tests"])}))
    ids = [mutant.id for mutant in mutants]
    if twice := sorted({each for each in ids if ids.count(each) > 1}):
        raise NotPlanted(f"more than one mutant is called {', '.join(twice)}")
    return tuple(mutants)


class Campaign:
    """Runs tests in copies of the tree. `collect`: run on after a test that fails. `timeout_s`: for one pytest."""

    def __init__(self, *, collect, timeout_s):
        self._collect, self._timeout_s = collect, timeout_s
        self._running = set()

    def run(self, mutants, jobs=1):
        """What was seen of each, in the order given."""
        with ThreadPoolExecutor(jobs) as pool:
            try:
                verdicts = list(pool.map(self._verdict, mutants))
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in tuple(self._running):  # no Ctrl-C reaches them
                    _kill(process)
                raise
        killers = tuple(dict.fromkeys(killer for verdict in verdicts for killer in verdict.killers))
        failing = set(self._run(None, killers)[0]) if killers else set()
        known = [sorted(failing.intersection(verdict.killers)) for verdict in verdicts]
        return [
            replace(verdict, trouble=f"**fails without the fault too: {', '.join(names)}**") if names else verdict
            for verdict, names in zip(verdicts, known, strict=True)
        ]

    def _verdict(self, mutant):
        started = time.monotonic()
        try:
            verdict = Verdict(mutant, *self._run(mutant, mutant.tests))
        except (NotPlanted, OSError) as error:
            verdict = Verdict(mutant, trouble=f"**{error}**")
        verdict = replace(verdict, seconds=time.monotonic() - started)
        print(verdict.row(), file=sys.stderr)
        return verdict

    def _run(self, mutant, tests):
        """The tests that fail in a copy with a fault, or without one, and whether pytest did not end."""
        with tempfile.TemporaryDirectory() as directory:
            tree = Path(shutil.copytree(ROOT, Path(directory, "tree"), ignore=NOT_COPIED))
            command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests]
            if mutant is not None:
                file = tree / mutant.file
                file.write_text(mutant.planted(file.read_text()))
                command += [] if self._collect else ["-x"]
            environment = os.environ | {"PYTHONPATH": str(tree)}  # also in the processes that tests start
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            with subprocess.Popen(command, cwd=tree, env=environment, start_new_session=True, **pipes) as process:
                self._running.add(process.pid)
                try:
                    output, _ = process.communicate(timeout=self._timeout_s if mutant is not None else None)
                except subprocess.TimeoutExpired:
                    return (), True
                finally:
                    self._running.discard(process.pid)
                    _kill(process.pid)
        failed = re.findall(r"^(?:FAILED|ERROR) ([^\s[]+(?:\[.*?\])?)(?: - |$)", output, re.MULTILINE)
        if not failed and (process.returncode or " passed" not in output):  # one that was skipped has not missed it
            raise NotPlanted(f"pytest ended with {process.returncode}: {' / '.join(output.splitlines()[-3:])}")
        return tuple(dict.fromkeys(failed)), False


def _kill(leader):
    """A run of pytest with all processes that it started, also ranks that outlived it."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", nargs="*", type=Path, help="files of faults (default: all in tests/mutants)")
    parser.add_argument("--only", action="append", metavar="ID", help="this fault; may be given again")
    parser.add_argument("--collect", action="store_true", help="every test that sees a fault, not only the first")
    parser.add_argument("--jobs", type=int, default=1, help="copies that are tested side by side (default: 1)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one run of pytest (default: 600)")
    options = parser.parse_args(arguments)
    mutants = load(options.lists or sorted(LISTS.glob("*.toml")))
    if unknown := set(options.only or ()) - {mutant.id for mutant in mutants}:
        parser.error(f"no mutant is called {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in mutants if not options.only or mutant.id in options.only]
    verdicts = Campaign(collect=options.collect, timeout_s=options.timeout).run(chosen, options.jobs)
    print("\n".join(["| id | what | killed by | seconds |", "|---|---|---|---|", *(each.row() for each in verdicts)]))
    missed = [verdict.mutant.id for verdict in verdicts if not verdict.seen]
    not_seen = f" Not: {', '.join(missed)}." * bool(missed)
    print(f"\n{len(verdicts) - len(missed)} of {len(verdicts)} were seen.{not_seen}")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
