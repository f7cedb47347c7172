"""`python -m bench`: gemmgen beside every other way to compute the same function. `--help` lists the options."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from bench import llama, longtail, suite_epilogue, suite_host, suite_jit, suite_training
from bench.cases import CASES, Case
from bench.environment import describe
from bench.rungs import RUNGS
from bench.settings import Settings
from bench.shapes import SHAPES, Shape, select

# A suite is one module with `run(settings, console) -> exit code`, and one row here.
SUITES = {"epilogue": suite_epilogue.run, "jit": suite_jit.run, "training": suite_training.run, "host": suite_host.run,
          "llama": llama.run, "longtail": longtail.run}  # fmt: skip

LLAMA_CASES = {case.name: case for case in llama.LLAMA_CASES}
ALL_CASES = CASES | LLAMA_CASES
PEERS = [name for name, rung in RUNGS.items() if rung.is_peer]
OURS = [name for name in RUNGS if name not in PEERS]
QUICK_CASES = ("bias_gelu_tanh", "int8_dequant_bias")
DEFAULT_OUT = Path(__file__).parent / "results"


class Names(click.ParamType):
    """Comma-separated names out of a table; its values in the order given."""

    name = "names"

    def __init__(self, table: dict[str, object]):
        self.table = table

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[object, ...]:
        names = [name.strip() for name in value.split(",") if name.strip()]
        if unknown := [name for name in names if name not in self.table]:
            self.fail(f"unknown: {', '.join(unknown)}; there are {', '.join(self.table)}", param, ctx)
        return tuple(self.table[name] for name in names)


@click.command(help=__doc__)
@click.option("--suite", type=click.Choice(list(SUITES)), default="epilogue", show_default=True)
@click.option("--cases", type=Names(ALL_CASES), default="", help="Comma-separated; all of the suite by default.")
@click.option("--shapes", default="headline", show_default=True, help=f"Of {', '.join(SHAPES)}, all; comma-separated.")
@click.option("--ms", default="", help="Only shapes with one of these M, comma-separated.")
@click.option("--part", default="1/1", show_default=True, help="i/n: the i-th of n parts of the suite llama.")
@click.option("--rungs", type=Names(RUNGS), default=",".join(OURS), help="Comma-separated; all but peers by default.")
@click.option("--peers", is_flag=True, help=f"Also {', '.join(PEERS)}, where they are installed.")
@click.option("--rounds", default=25, show_default=True, help="Samples of each rung.")
@click.option("--budget-s", type=float, default=float("inf"), help="No new problem starts after so many seconds.")
@click.option("--max-autotune/--no-max-autotune", default=True, help="torch.compile's max-autotune: slow to compile.")
@click.option("--autotune-shapes", default="headline", show_default=True, help="Shape groups that max-autotune gets.")
@click.option("--autotune-budget-s", default=90.0, show_default=True, help="Seconds that max-autotune may compile.")
@click.option("--tuned", default=0, help="Kernels that gemmgen measures for each problem of llama and longtail first.")
@click.option("--out", type=click.Path(path_type=Path), default=DEFAULT_OUT, help="Folder of the results.")
@click.option("--commit", default=None, help="Recorded where git cannot be asked.")
@click.option("--plot/--no-plot", default=True, help="Also write a PNG.")
@click.option("--quick", is_flag=True, help="Two cases, one shape, few rounds, no max-autotune.")
def main(
    suite, cases, shapes, ms, rungs, rounds, budget_s, max_autotune, autotune_shapes, autotune_budget_s, out, commit,
    plot, quick, tuned, peers, part,
):  # fmt: skip
    chosen = _shapes(shapes, ms if suite == "epilogue" else "")
    settings = Settings(
        cases=_cases(suite, cases, quick),
        shapes=chosen[:1] if quick else chosen,
        rungs=tuple(dict.fromkeys((*rungs, *(RUNGS[name] for name in PEERS if peers)))),
        out=out,
        budget_s=budget_s,
        rounds=7 if quick else rounds,
        min_rounds=min(7, rounds),
        autotune_groups=_listed(autotune_shapes) if max_autotune and not quick else (),
        autotune_budget_s=autotune_budget_s,
        plot=plot,
        quick=quick,
        ms=tuple(map(int, _listed(ms))),
        part=_part(part),
        tuned=tuned,
        environment=describe(commit),
    )
    sys.exit(SUITES[suite](settings, _console()))


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _cases(suite: str, cases: tuple[Case, ...], quick: bool) -> tuple[Case, ...]:
    if suite == "llama":
        return cases or tuple(LLAMA_CASES.values())
    return tuple(CASES[name] for name in QUICK_CASES) if quick else cases or tuple(CASES.values())


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise click.BadParameter(f"{text} is not a part such as 1/2")
    return int(part), int(parts)


def _shapes(groups: str, ms: str) -> tuple[Shape, ...]:
    try:
        shapes = tuple(select(_listed(groups), map(int, _listed(ms))))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    if not shapes:
        raise click.BadParameter(f"no shape of {groups} has M in {ms}")
    return shapes


def _console() -> Console:
    """Wide where nobody looks at a terminal, so that tables in logs are not folded."""
    return Console() if sys.stdout.isatty() else Console(width=200)


if __name__ == "__main__":
    main()
