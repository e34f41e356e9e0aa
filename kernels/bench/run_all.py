"""All tests and benchmarks of the kernels on a GPU, and whether their targets are met."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(FOLDER), str(FOLDER.parent)) if path not in sys.path]

from gpu_tests import FileOutcome, kernel_test_files, run_tests  # noqa: E402
from harness import BenchCase, Lazy, Rival, Timing, measure, synchronize  # noqa: E402
from provenance import ROOT, device_state, provenance  # noqa: E402
from results import Bounds, Result, ResultFile, measure_bounds  # noqa: E402
from rich.console import Console  # noqa: E402
from tables import progress, show_outcome, show_results, show_targets  # noqa: E402
from targets import Target, judge  # noqa: E402

SEED = 0
FIRST = ("draft_attention", "best_prefixes", "best_nodes", "link_tree", "accept_greedy", "move_kv")
"""What the targets are about, in case time runs out."""
BENCHES = (*FIRST, *sorted({path.stem[6:] for path in FOLDER.glob("bench_*.py")} - {*FIRST}))
TESTS_SHARE = 0.5
"""Of the minutes, at most."""
MAX_ERROR = 500
DEFAULT_OUTPUT = ROOT / "build" / "kernel_results.json"
EXAMPLES = """\
examples:
  python kernels/bench/run_all.py                      everything, on the GPU
  python kernels/bench/run_all.py --only draft_attention move_kv -o attention.json
  python kernels/bench/run_all.py --no-tests --max-minutes 5
  python kernels/bench/run_all.py --device cpu         the torch forms, at small sizes

exit codes:
  0  all tests passed, all cases have a time (whatever the targets say; rivals may be missing)
  1  a test or a case failed, or the tests were not over in time
  2  wrong options, or no such device
"""


@dataclass
class Run:
    """A run under way: what it is told, and what it has found."""

    device: torch.device
    repeats: int
    deadline: float
    """Of `time.monotonic`."""
    bounds: Bounds
    file: ResultFile
    results: list[Result] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    unfinished: set[str] = field(default_factory=lambda: {*BENCHES})
    broken: dict[tuple[str, str], str] = field(default_factory=dict)
    """Rivals that cannot be had, and why, by op and name."""
    is_device_lost: bool = False

    def is_over(self) -> bool:
        """No more time, or no device."""
        return self.is_device_lost or time.monotonic() > self.deadline

    def write(self) -> None:
        """What was found up to now."""
        cases = [result.as_json(self.bounds) for result in self.results]
        self.file.write(cases=cases, failures=self.failures, left_out=self.left_out)


def bench_cases(name: str) -> Callable[[torch.device], Iterator[BenchCase]]:
    """The function `cases` of a benchmark."""
    return import_module(f"bench_{name}").cases  # type: ignore[no-any-return]


def time_bench(name: str, run: Run) -> Iterator[Result]:
    """Yield the results of a benchmark, which are in the file by then."""
    torch.manual_seed(SEED)
    count = 0
    if not run.is_over():
        try:
            for case in bench_cases(name)(run.device):
                result = _time_case(case, run)
                count += 1
                run.results.append(result)
                run.write()
                yield result
                if run.is_over():
                    break
            else:
                run.unfinished.discard(name)
                return
        except Exception as error:  # whatever it is, the other benchmarks can be run
            run.failures.append(f"{name}: making case {count + 1}: {_describe(error)}")
            _check_device(run)
            run.write()
            return
    reason = "the device is lost" if run.is_device_lost else "no time left"
    run.left_out.append(f"{name} after {count} cases: {reason}" if count else f"{name}: {reason}")
    run.write()


def _time_case(case: BenchCase, run: Run) -> Result:
    about = (case.op, case.shape, case.num_bytes, case.num_flops)
    try:
        timing = measure(case.run, run.device, run.repeats)
    except Exception as error:
        why = _describe(error)
        run.failures.append(f"{case.op} {case.shape}: {why}")
        _check_device(run)
        return Result(*about, None, dict.fromkeys(case.rivals, "ours failed"), why)
    return Result(*about, timing, {
        name: _time_rival(case.op, name, rival, run) for name, rival in case.rivals.items()
    })  # fmt: skip


def _time_rival(op: str, name: str, rival: Rival, run: Run) -> Timing | str:
    """Its time, or why there is none. One that failed is not tried at other shapes."""
    if run.is_over():
        return "the device is lost" if run.is_device_lost else "no time left"
    if (op, name) in run.broken:
        return run.broken[op, name]
    try:
        call = rival.prepare() if isinstance(rival, Lazy) else rival
        return measure(call, run.device, run.repeats)
    except torch.OutOfMemoryError as error:
        return _describe(error)
    except Exception as error:
        run.broken[op, name] = _describe(error)
        _check_device(run)
        return run.broken[op, name]


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:MAX_ERROR]}"


def _check_device(run: Run) -> None:
    """After an illegal access nothing runs on a GPU any more."""
    try:
        synchronize(run.device)
    except RuntimeError as error:
        run.is_device_lost = True
        run.failures.append(f"the device is lost: {_describe(error)}")


def run_kernel_tests(
    names: Sequence[str], deadline: float, jobs: int, file: ResultFile, console: Console
) -> list[FileOutcome]:
    """Run the tests of the named ops, and show and keep their counts."""
    files = kernel_test_files(names)
    with progress(console) as bar:
        task = bar.add_task("tests on the GPU", total=len(files))
        outcomes = run_tests(files, deadline, jobs, lambda _: bar.advance(task))
    counts = tests_json(outcomes)
    file.write(tests=counts)
    for outcome in outcomes:
        show_outcome(outcome, console)
    console.print("tests: {passed} passed, {failed} failed, {skipped} skipped, "
                  "{files_not_over_in_time} files not over in time".format(**counts))  # fmt: skip
    return outcomes


def tests_json(outcomes: Sequence[FileOutcome]) -> dict[str, Any]:
    """Counts, and what each file came to."""
    return {
        "passed": sum(outcome.passed for outcome in outcomes),
        "failed": sum(len(outcome.failures) for outcome in outcomes),
        "skipped": sum(outcome.skipped for outcome in outcomes),
        "files_not_over_in_time": sum(not outcome.is_finished for outcome in outcomes),
        "files": [asdict(outcome) for outcome in outcomes],
    }


def are_well(outcomes: Sequence[FileOutcome]) -> bool:
    """All tests were run, and none failed."""
    return all(outcome.is_finished and not outcome.failures for outcome in outcomes)


def time_all(names: Sequence[str], run: Run, console: Console) -> list[Target]:
    """Time the named benchmarks, show them one by one, and judge the targets."""
    with progress(console) as bar:
        task = bar.add_task("benchmarks", total=len(names))
        for name in names:
            results = []
            for result in time_bench(name, run):
                results.append(result)
                bar.update(task, description=f"{result.op} {result.shape}")
            bar.advance(task)
            if results:
                show_results(name, results, run.bounds, console)
    targets = judge(
        run.results, run.bounds, unfinished=run.unfinished, is_gpu=run.device.type == "cuda"
    )
    run.file.write(
        targets=[target.as_json() for target in targets],
        state_after=device_state(run.device) if not run.is_device_lost else None,
        is_finished=True,
    )
    return targets


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="[cuda]")
    parser.add_argument("--only", nargs="+", metavar="OP", help=f"of: {', '.join(BENCHES)}")
    parser.add_argument("--no-tests", action="store_true", help="time only; on a CPU none are run")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1),
                        help="files of tests at a time [%(default)s]")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=20, help="of each call [%(default)s]")
    parser.add_argument("--max-minutes", type=float, default=12, metavar="M",
                        help="begin no case and no test after this long [%(default)s]")  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, default=DEFAULT_OUTPUT, metavar="FILE",
                        help=f"JSON, written after every case [build/{DEFAULT_OUTPUT.name}]",
                        )  # fmt: skip
    options = parser.parse_args(arguments)
    for name in options.only or ():
        if name not in BENCHES:
            near = get_close_matches(name, BENCHES, n=1)
            hint = f"; did you mean {near[0]}?" if near else f": {', '.join(BENCHES)}"
            parser.error(f"--only: no benchmark is named {name}{hint}")
    for name in ("jobs", "repeats", "max_minutes"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} has to be more than 0")
    if options.device == "cuda":
        if not torch.cuda.is_available():
            parser.error(f"--device cuda: torch {torch.__version__} finds no GPU here; "
                         "--device cpu runs the torch forms at small sizes")  # fmt: skip
        if os.environ.get("TRITON_INTERPRET") == "1":
            parser.error("--device cuda: TRITON_INTERPRET=1 would time the interpreter; unset it")
    if options.output == DEFAULT_OUTPUT:
        DEFAULT_OUTPUT.parent.mkdir(exist_ok=True)
    if not options.output.parent.is_dir():
        parser.error(f"--output: there is no folder {options.output.parent}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    options = parse(arguments)
    started = time.monotonic()
    deadline = started + 60 * options.max_minutes
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # times then do not depend on the number of cores
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)
    names = [name for name in BENCHES if not options.only or name in options.only]
    content = {
        "provenance": provenance(device, SEED),
        "options": {**vars(options), "output": str(options.output)},
        "is_finished": False, "bounds": None, "tests": None, "state_after": None,
        "cases": [], "failures": [], "left_out": [], "targets": [],
    }  # fmt: skip
    file = ResultFile(options.output, content)
    outcomes: list[FileOutcome] = []
    if device.type == "cuda" and not options.no_tests:
        tests_end = started + 60 * TESTS_SHARE * options.max_minutes
        outcomes = run_kernel_tests(names, tests_end, options.jobs, file, console)
    bounds = measure_bounds(device, options.repeats)
    file.write(bounds=asdict(bounds))
    run = Run(device, options.repeats, deadline, bounds, file)
    targets = time_all(names, run, console)
    show_targets(targets, run.failures, run.left_out, console)
    console.print(f"{len(run.results)} cases in {time.monotonic() - started:.0f} s, "
                  f"all numbers in {options.output}", soft_wrap=True)  # fmt: skip
    return 0 if are_well(outcomes) and not run.failures else 1


if __name__ == "__main__":
    sys.exit(main())
