"""What vLLM's Model Runner V2 does with states between steps, where pages are lazystate's."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState


class Replaying(MambaHybridModelState):
    """vLLM's, with nothing to do after drafts: the next step's lengths say what was kept.

    So `num_accepted_tokens_gpu` stays 1, by which vLLM copies a page to the next block of tokens as
    it is. Where kept drafts have gone beyond the end of a block, that block gets a copy of the page
    that they are in: it holds the state at the block's end as well as any later one.
    """

    def postprocess_state(
        self,
        idx_mapping: Tensor,
        num_sampled: Tensor | int,
        num_computed_tokens: Tensor | None = None,
    ) -> None:
        """See the class.

        Args:
            idx_mapping: [B], number of each row's request, -1 for none.
            num_sampled: [B] or for all rows, tokens that were kept, 0 amid a prompt.
            num_computed_tokens: [requests], after the step; None where a later call has them.
        """
        drafts = self.vllm_config.num_speculative_tokens > 0
        context = getattr(self, "_mamba_ctx", None)  # vLLM makes it with prefix caching only
        if not drafts or context is None or num_computed_tokens is None:
            return
        assert self._mamba_spec is not None
        spare = self.max_num_reqs  # for rows without a request
        requests = torch.where(idx_mapping < 0, spare, idx_mapping).long()
        known = requests.clamp(max=spare - 1)
        ended, columns = completed(
            num_computed_tokens[known], num_sampled, self._mamba_spec.block_size
        )
        shape, at = (3, spare + 1), idx_mapping.device
        source, target, zeros = torch.zeros(shape, dtype=torch.int32, device=at)
        source[requests] = torch.where(ended, self._mamba_state_idx_gpu[known], -1)
        target[requests] = columns
        context.run_fused_precopy(len(requests), target, source, zeros, idx_mapping)


def replaying(stock: type | None) -> type:
    """The class of a model whose own is `stock`, None for vLLM's of hybrid models."""
    if stock is None:
        return Replaying
    if issubclass(stock, Replaying):  # of a model inside of the model
        return stock
    return type(stock.__name__, (Replaying, stock), {})


def completed(lengths: Tensor, kept: Tensor | int, size: int) -> tuple[Tensor, Tensor]:
    """Whether a step has completed a block of tokens, and which one last.

    Args:
        lengths: int32 [B], tokens of each sequence after the step. kept: of them in the step; 0 is
            taken as 1, since vLLM ends a chunk of a prompt at a block's end or within a block.
        size: tokens of a block.

    Returns:
        (bool [B], int32 [B]).
    """
    kept = kept.clamp(min=1) if isinstance(kept, Tensor) else max(kept, 1)
    last = lengths // size
    return last * size > lengths - kept, (last - 1).int()
