"""A small random Qwen3-MoE checkpoint with a byte-level tokenizer, made on the spot: nothing is downloaded."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

END_OF_TEXT = "<|endoftext|>"


def make_tiny_moe(
    path: str | Path,
    *,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 64,
    experts: int = 8,
    top_k: int = 2,
    intermediate: int = 64,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    vocab_size: int = 512,
    max_position: int = 4096,
    initializer_std: float = 0.2,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """Writes an fp32 Qwen3-MoE checkpoint and tokenizer in Hugging Face format to `path`, and returns it.

    The same arguments give the same bytes. `intermediate` is the size I of one expert. The default standard deviation
    is ten times the usual 0.02, so that attention and experts change the greedy token: with 0.02 a layer with the wrong
    expert's weights would go unnoticed. Without `tokenizer` it is one token a byte. Raises ValueError if the shape does
    not fit together.
    """
    tokenizer = tokenizer or byte_tokenizer(max_position)
    if vocab_size < len(tokenizer):
        raise ValueError(f"vocab_size must hold the tokenizer's tokens, at least {len(tokenizer)}, got {vocab_size}")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be between 1 and experts={experts}, got {top_k}")
    if q_heads % kv_heads:
        raise ValueError(f"q_heads must be a multiple of kv_heads, got {q_heads} and {kv_heads}")
    config = Qwen3MoeConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        moe_intermediate_size=intermediate,
        num_experts=experts,
        num_experts_per_tok=top_k,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab_size,
        max_position_embeddings=max_position,
        initializer_range=initializer_std,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        dtype="float32",
        head_dim=head_dim,  # type: ignore[call-arg]  # read by the model, and not among the declared fields
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config).float()
    path = Path(path)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def byte_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """One token a UTF-8 byte, 0-255 in the order of GPT-2's byte alphabet, and <|endoftext|> as 256."""
    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def _byte_vocabulary() -> dict[str, int]:
    return {token: index for index, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), END_OF_TEXT])}
