"""What a scenario file says: frozen data; `scenario_file` reads it, `workload` and `arrivals` act.

A scenario is a load (when conversations begin), a workload (what they ask), and when to stop. A
conversation is one request, unless the workload has more turns. Nothing depends on the server, so
that the same file asks every server the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from specstack_dsl.messages import found

SHIPPED = Path(__file__).parent / "scenarios"
"""The scenarios that come with the package; their prompts and traces lie below."""

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


def _listed(value: Any) -> Any:
    """One level may be written without a list."""
    return value if isinstance(value, list | tuple) else (value,)


Levels = BeforeValidator(_listed)
NotEmpty = Field(strict=False, min_length=1)


class Options(BaseModel):
    """Frozen, without unknown keys, and nothing is converted: text is no number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


class Closed(Options):
    """Users who each begin a conversation when their last one has ended."""

    kind: Literal["closed"] = "closed"
    users: Annotated[tuple[Count, ...], Levels, NotEmpty] = Field(
        description="users at a time; a list is one phase for each"
    )


class Poisson(Options):
    """Conversations that begin independently of each other and of the answers."""

    kind: Literal["poisson"] = "poisson"
    rate: Annotated[tuple[Positive, ...], Levels, NotEmpty] = Field(
        description="conversations that begin per second; a list is one phase for each"
    )


class Gamma(Options):
    """Conversations that begin in bursts: gaps by a Gamma law."""

    kind: Literal["gamma"] = "gamma"
    rate: Annotated[tuple[Positive, ...], Levels, NotEmpty] = Field(
        description="conversations that begin per second; a list is one phase for each"
    )
    cv: float = Field(
        default=3.0,
        ge=0.01,
        le=100,
        description="standard deviation of the gaps over their mean: 1 is Poisson, above it bursts",
    )


class Trace(Options):
    """Requests at the times, and of the lengths, of a recorded trace."""

    kind: Literal["trace"] = "trace"
    file: str = Field(
        min_length=1, description="Azure LLM inference trace (.csv) or Mooncake trace (.jsonl)"
    )
    scale_time: Positive = Field(
        default=1.0, description="factor of the times: below 1 requests come faster"
    )
    scale_lengths: Positive = Field(default=1.0, description="factor of prompt and answer lengths")
    scale_outputs: Positive | None = Field(
        default=None, description="factor of answer lengths, where it is not that of prompts"
    )
    skip: int = Field(default=0, ge=0, description="rows to leave out at the start")


class Length(Options):
    """A law of lengths in tokens: log-normal, or always the mean; then kept within min and max."""

    mean: Positive = Field(description="tokens")
    cv: float = Field(default=0.0, ge=0, le=10, description="standard deviation over the mean")
    min: Count = Field(default=1, description="tokens")
    max: Count | None = Field(default=None, description="tokens")


class Share(Options):
    """A temperature, and how many of the conversations have it."""

    temperature: float = Field(ge=0, le=2, description="0 is greedy")
    share: Positive = Field(default=1.0, description="weight among the others")


class SharedPrefix(Options):
    """Long system prompts that many requests have in common."""

    tokens: Count = Field(description="length of each prefix, about")
    groups: Count = Field(default=1, description="different prefixes")


class Structured(Options):
    """Answers that follow a JSON schema."""

    name: str = Field(default="answer", min_length=1, description="name of the schema")
    json_schema: dict[str, Any] = Field(min_length=1, description="the schema")


class Work(Options):
    """What requests ask."""

    prompts: Annotated[tuple[str, ...], NotEmpty] = Field(
        description="JSON Lines files of prompts, mixed in turn"
    )
    prompt_tokens: Length | None = Field(
        default=None,
        description="pad prompts to this length, about, a shared prefix not counted; a number is"
        " always that; a trace has its own",
    )
    output_tokens: Length | None = Field(
        default=None,
        description="most tokens of an answer; a number is always that; a trace has its own",
    )
    exact_output: bool = Field(
        default=False, description="go on to exactly that length (SGLang: ignore_eos)"
    )
    temperature: Annotated[tuple[Share, ...], NotEmpty] = Field(
        default=(Share(temperature=0.0),), description="of all requests, or shares"
    )
    shared_prefix: SharedPrefix | None = Field(default=None, description="common system prompts")
    turns: Count = Field(default=1, description="user turns of a conversation")
    think_s: float = Field(default=0.0, ge=0, description="seconds between an answer and a turn")
    structured: Structured | None = Field(default=None, description="answers by a JSON schema")

    @field_validator("prompt_tokens", "output_tokens", mode="before")
    @classmethod
    def _number_is_a_length(cls, value: Any) -> Any:
        if value is None or isinstance(value, dict | Length):
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"expected an integer, or mean, cv, min and max, found {found(value)}")
        return {"mean": value}

    @field_validator("temperature", mode="before")
    @classmethod
    def _number_is_a_share(cls, value: Any) -> Any:
        return value if isinstance(value, list | tuple) else ({"temperature": value},)


class Stop(Options):
    """When a phase ends: one of the two."""

    seconds: Positive | None = Field(default=None, description="after so long, warm-up included")
    requests: Count | None = Field(
        default=None, description="after so many conversations, warm-up included"
    )


class Warmup(Options):
    """What comes first in every phase and counts nowhere: in the measure of `stop`, or nothing."""

    seconds: Positive | None = Field(default=None, description="so long")
    requests: Count | None = Field(default=None, description="so many conversations")


class Slo(Options):
    """What a request must meet to count as good."""

    ttft_ms: Positive | None = Field(default=None, description="time to first token")
    tpot_ms: Positive | None = Field(default=None, description="time per output token after it")


class Scenario(Options):
    """One load test."""

    version: Literal[1] = Field(description="of this language")
    name: str = Field(min_length=1, description="default: the file's name")
    description: str = Field(default="", description="what it is for")
    arrivals: Annotated[Closed | Poisson | Gamma | Trace, Field(discriminator="kind")] = Field(
        description="when requests come"
    )
    workload: Work = Field(description="what they ask")
    stop: Stop = Field(description="when a phase ends")
    warmup: Warmup = Field(default=Warmup(), description="what comes first and counts nowhere")
    slo: Slo = Field(default=Slo(), description="what a request must meet to count as good")
    timeout_s: Positive = Field(default=300.0, description="a request that takes longer failed")
    seed: int = Field(default=0, ge=0, description="of everything that is drawn")
    folder: str = Field(default=".", description="what file names are relative to", exclude=True)

    def resolve(self, name: str) -> Path:
        """The file that a name in the scenario means."""
        return Path(self.folder, Path(name).expanduser())
