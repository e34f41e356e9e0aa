"""`specstack serve`: from a pipeline file to a running server.

Everything that can be refused is refused here, before the engine (and torch) is loaded.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from specstack.budget.cost_store import read_table
from specstack.budget.cost_table import CostTableError
from specstack.models.catalogue import parse_reference
from specstack.models.packaged import ensure
from specstack.plan import Plan, plan_file
from specstack_serving.address import base_url, port_problem
from specstack_serving.carrier import export_plan
from specstack_serving.contract import installed_version
from specstack_serving.sglang_compat import SGLANG_VERSION
from specstack_serving.supervisor import Supervisor, engine_command


@click.command()
@click.argument("pipeline", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Override one value.")
def serve(pipeline: Path, overrides: tuple[str, ...]) -> None:
    """Serve PIPELINE with an OpenAI-compatible API until Ctrl-C.

    \b
    specstack serve dsl/specs/quickstart.yaml
    specstack serve my.yaml --set engine.port=30001 --set tree=chain
    """
    plan = prepare(pipeline, overrides)
    _say(
        f"plan {plan.hash[:12]}: {plan.target.model}, drafter {plan.drafter.kind}, "
        f"tree {plan.tree.kind}, up to {plan.shapes.max_draft_budget} drafts per round, "
        f"on {plan.engine.device}"
    )
    for warning in plan.warnings:
        _say(f"warning: {warning}")
    _say(f"starting SGLang {SGLANG_VERSION}: {base_url(plan.engine.host, plan.engine.port)}/v1")
    export_plan(plan)
    os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", "0")
    sys.exit(Supervisor(engine_command(), _say).run())


def prepare(pipeline: Path, overrides: tuple[str, ...]) -> Plan:
    """Check, compile, fetch; raises SpecError, PlanError, ModelError or ClickException."""
    plan = plan_file(pipeline, overrides)
    _require_engine()
    _check_costs(plan)
    if problem := port_problem(plan.engine.host, plan.engine.port):
        raise click.ClickException(problem)
    name = parse_reference(plan.target.model)
    if name is not None:
        ensure(name)
    elif plan.target.facts is None:
        _fetch_config(plan.target.path, plan.engine.args.get("revision"))
        plan = plan_file(pipeline, overrides)
    return plan


def _check_costs(plan: Plan) -> None:
    """A named cost table can be read; whether it was measured here the engine knows."""
    for part in filter(None, (plan.budget, plan.shadow)):
        if (costs := part.options.get("costs", "auto")) != "auto":
            try:
                read_table(Path(costs))
            except CostTableError as error:
                raise click.ClickException(f"budget.costs: {error}") from None


def _require_engine() -> None:
    version = installed_version()
    if version is None:
        raise click.ClickException(
            "SGLang is not installed: pip install 'specstack[serve]' (11 GB, Linux)"
        )
    if version != SGLANG_VERSION:
        raise click.ClickException(
            f"SGLang {version} is installed, specstack runs inside {SGLANG_VERSION}: "
            f"pip install sglang=={SGLANG_VERSION}; `specstack doctor` lists what differs"
        )
    platform = os.environ.get("SGLANG_PLATFORM")
    if platform not in (None, "", "specstack_cpu"):
        raise click.ClickException(
            f"SGLANG_PLATFORM={platform} makes SGLang skip the plug-ins of other packages, "
            "specstack's too: unset it"
        )


def _fetch_config(model: str, revision: str | None) -> None:
    """Get a hub model's config.json, so that the plan is checked against it before a download."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    _say(f"fetching the config of {model}")
    try:
        hf_hub_download(model, "config.json", revision=revision)
    except GatedRepoError:
        reason = "it needs a licence agreement: accept it on the model's page, then `hf auth login`"
    except RepositoryNotFoundError:
        reason = "no such model on the hub (or it is private: `hf auth login`)"
    except LocalEntryNotFoundError:
        reason = "the hub cannot be reached and the model is not in its local cache"
    except (EntryNotFoundError, HFValidationError, HfHubHTTPError) as error:
        reason = str(error).splitlines()[0]
    else:
        return
    raise click.ClickException(f"target {model}: {reason}")


def _say(text: str) -> None:
    click.echo(f"specstack: {text}", err=True)
