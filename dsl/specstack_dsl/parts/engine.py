"""What is SGLang's: device, kernels, capacity, address."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, JsonValue

from specstack_dsl.parts.base import Auto, Section


class Engine(Section):
    """Options of the engine."""

    section = "engine"
    summary: ClassVar[str] = "What is SGLang's; anything else goes through args."

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where an accelerator is visible, else cpu"
    )
    tp: int = Field(1, ge=1, description="Tensor parallel size")
    attention_backend: Literal[
        "auto", "specstack_cpu", "torch_native", "triton", "flashinfer", "fa3"
    ] = Field("auto", description="auto: specstack_cpu on cpu, triton on cuda")
    page_size: Auto = Field("auto", description="Tokens per page of the KV cache; auto: 1")
    max_running_requests: Auto = Field(
        "auto", description="Requests per batch; auto: 16 on cpu, SGLang's choice on cuda"
    )
    max_total_tokens: Auto = Field(
        "auto", description="Slots of the KV cache; auto: from memory on cpu, SGLang's on cuda"
    )
    context_length: Auto = Field(
        "auto", description="Longest prompt plus output; auto: the model's own"
    )
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on")
    port: int = Field(30000, ge=1, le=65535, description="Port to listen on")
    args: dict[str, JsonValue] = Field(
        default_factory=dict, description="Further SGLang arguments by name"
    )
