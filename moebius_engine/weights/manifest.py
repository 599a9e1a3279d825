"""Every tensor that a full weight update of a model consists of, by its Hugging Face name."""

from moebius_engine.layout.shape import ModelShape

Manifest = dict[str, tuple[int, ...]]


def is_expert(name: str) -> bool:
    """Whether the tensor is one expert's weight, which lives in one layout only; all others exist as full and shard."""
    return ".mlp.experts." in name


def qwen3_moe_manifest(shape: ModelShape) -> Manifest:
    """Names and shapes of Qwen3-MoE (transformers 5.9.0 `Qwen3MoeForCausalLM`, one tensor an expert).

    Returns: name → shape, in the checkpoint's (out, in) convention.
    """
    hidden, head_dim = shape.hidden, shape.head_dim
    manifest: Manifest = {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (shape.vocab_size, hidden),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        manifest |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (shape.q_heads * head_dim, hidden),
            prefix + "self_attn.k_proj.weight": (shape.kv_heads * head_dim, hidden),
            prefix + "self_attn.v_proj.weight": (shape.kv_heads * head_dim, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, shape.q_heads * head_dim),
            prefix + "self_attn.q_norm.weight": (head_dim,),
            prefix + "self_attn.k_norm.weight": (head_dim,),
            prefix + "mlp.gate.weight": (shape.experts, hidden),
        }
        for expert in range(shape.experts):
            prefix_e = f"{prefix}mlp.experts.{expert}."
            manifest |= {
                prefix_e + "gate_proj.weight": (shape.intermediate, hidden),
                prefix_e + "up_proj.weight": (shape.intermediate, hidden),
                prefix_e + "down_proj.weight": (hidden, shape.intermediate),
            }
    return manifest
