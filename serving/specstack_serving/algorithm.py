"""The algorithm that SGLang knows as SPECSTACK: capabilities and argument handling.

`CustomSpecAlgo` of 0.5.23 lacks four methods that the core calls (`carries_draft_hidden_states`,
`create_future_map`, `need_topk`, `get_platform_worker_cls`); `contract` checks that nothing the
core calls on an algorithm is missing from this class.
"""

from __future__ import annotations

from typing import Any

from specstack.plan import ALGORITHM
from specstack_serving import sglang_compat as sgl
from specstack_serving.carrier import current_plan


class SpecstackAlgo(sgl.CustomSpecAlgo):  # type: ignore[misc]
    """Speculation without draft KV of its own and with a per-round width."""

    def carries_draft_hidden_states(self) -> bool:
        """No recurrent hidden state travels between rounds."""
        return False

    def need_topk(self) -> bool:
        """Only the bonus token is relayed; the rest is kept per slot by the drafter."""
        return False

    def get_platform_worker_cls(self) -> None:
        """One worker serves every platform."""

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        """The stock relay of bonus tokens and lengths between overlapped rounds."""
        return sgl.FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def has_draft_kv(self) -> bool:
        """No draft KV: no per-branch page over-allocation."""
        return False

    def handle_server_args(self, server_args: Any) -> None:
        """Size SGLang's buffers for the widest tree of the plan."""
        plan = current_plan()
        if plan is None:
            raise ValueError(
                f"the {ALGORITHM} algorithm needs a plan: start the server with "
                "`specstack serve PIPELINE.yaml`"
            )
        server_args.speculative_num_draft_tokens = plan.shapes.max_draft_budget + 1
        server_args.speculative_num_steps = plan.shapes.max_depth
        # Above 1, FA3 honours tree masks; it is 1 for chains only.
        server_args.speculative_eagle_topk = 1 if plan.tree.kind == "chain" else 2
