"""Structured output on a CPU: xgrammar's masks, which SGLang applies on CUDA devices only."""

from sglang.srt.constrained.torch_ops.bitmask_ops import apply_token_bitmask_inplace_torch
from sglang.srt.plugins.hook_registry import HookType

from moebius_engine.sglang.hooks import Hook


def apply_vocab_mask(original, self, logits, vocab_mask):
    if not logits.is_cpu:
        return original(self, logits, vocab_mask)
    apply_token_bitmask_inplace_torch(logits, vocab_mask)
    return None


# Apart from the platform's table: only an engine with grammar_backend="xgrammar" imports xgrammar.
XGRAMMAR_HOOKS = (
    Hook(
        "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
        HookType.AROUND,
        apply_vocab_mask,
        ("self", "logits", "vocab_mask"),
        "it raises on a CPU, although SGLang has a function that works there",
    ),
)
