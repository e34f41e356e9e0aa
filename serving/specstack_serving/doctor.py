"""`specstack doctor`: is this machine ready, and is SGLang the one that specstack knows?"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from specstack import __version__
from specstack.facts import HostFacts
from specstack_serving.contract import Finding, check, installed_root, installed_version


@click.command()
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
@click.option("--all", "show_all", is_flag=True, help="List the names that are as expected, too.")
def doctor(form: str, show_all: bool) -> None:
    """Check the installation: host, versions, every name of SGLang that specstack relies on.

    Reads SGLang's source without importing it. Exit code 1 when anything is missing.

    \b
    specstack doctor
    specstack doctor --format json
    """
    root = installed_root()
    if root is None:
        findings = [Finding("version", "sglang", "not installed: pip install 'specstack[serve]'")]
    else:
        findings = check(root, installed_version())
    problems = [f for f in findings if f.problem]
    host = HostFacts.detect()
    if form == "json":
        report = {
            "specstack": __version__,
            "python": platform.python_version(),
            "host": asdict(host),
            "sglang": installed_version(),
            "findings": [asdict(f) for f in findings],
        }
        click.echo(json.dumps(report, indent=2))
    else:
        _print(findings if show_all else problems, len(findings), host)
    sys.exit(1 if problems else 0)


def _print(findings: list[Finding], total: int, host: HostFacts) -> None:
    console = Console(markup=False)
    accelerator = "an accelerator" if host.has_accelerator else "no accelerator"
    console.print(
        f"specstack {__version__}, Python {platform.python_version()}, "
        f"{host.num_cpus} CPUs, {accelerator}, SGLang {installed_version() or '-'}"
    )
    if findings:
        table = Table("name", "where", "state")
        for finding in findings:
            table.add_row(finding.name, finding.path, finding.problem or "as expected")
        console.print(table)
    wrong = sum(bool(f.problem) for f in findings)
    console.print(f"{total} names of SGLang checked, {wrong} not as expected")
