"""Tiny random models of every family: two to four layers, a small vocabulary, float32, well under a second each."""

from __future__ import annotations

import functools

import torch
import transformers as tf
from transformers import PreTrainedModel

from devices import DEVICE

VOCAB = 48
COMMON = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
ATTENTION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
SSD = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2}
HYBRID = ["linear_attention", "full_attention", "linear_attention"]


def _configs() -> dict[str, functools.partial]:
    make = functools.partial
    return {
        "llama": make(tf.LlamaConfig, **ATTENTION),
        "mistral": make(tf.MistralConfig, **ATTENTION, head_dim=8, sliding_window=6),
        "qwen2": make(tf.Qwen2Config, **ATTENTION),
        "qwen3": make(tf.Qwen3Config, **ATTENTION, head_dim=8),
        "gemma3": make(
            tf.Gemma3TextConfig,
            **{**ATTENTION, "num_hidden_layers": 3},
            head_dim=8,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "gpt_neox": make(tf.GPTNeoXConfig, **{k: v for k, v in ATTENTION.items() if k != "num_key_value_heads"}),
        "gpt2": make(tf.GPT2Config, n_embd=32, n_layer=2, n_head=4, n_positions=512),
        "opt": make(
            tf.OPTConfig,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            word_embed_proj_dim=32,
        ),
        "mamba": make(tf.MambaConfig, hidden_size=32, num_hidden_layers=2, state_size=8),
        "falcon_mamba": make(tf.FalconMambaConfig, hidden_size=32, num_hidden_layers=2, state_size=8),
        "mamba2": make(
            tf.Mamba2Config,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=8,
            num_heads=8,
            head_dim=8,
            n_groups=1,
            chunk_size=8,
        ),
        "falcon_h1": make(
            tf.FalconH1Config, **ATTENTION, head_dim=8, mamba_d_ssm=64, mamba_chunk_size=8, **SSD, mamba_d_conv=4
        ),
        "qwen3_next": make(
            tf.Qwen3NextConfig,
            **{**ATTENTION, "num_hidden_layers": 3},
            head_dim=8,
            **DELTA,
            layer_types=HYBRID,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        "qwen3_5_text": make(
            tf.Qwen3_5TextConfig, **{**ATTENTION, "num_hidden_layers": 3}, head_dim=8, **DELTA, layer_types=HYBRID
        ),
        "olmo_hybrid": make(tf.OlmoHybridConfig, **{**ATTENTION, "num_hidden_layers": 3}, **DELTA, layer_types=HYBRID),
        "kimi_linear": make(
            tf.KimiLinearConfig,
            **{**ATTENTION, "num_hidden_layers": 3, "num_key_value_heads": 4},
            kv_lora_rank=16,
            qk_rope_head_dim=4,
            qk_nope_head_dim=8,
            v_head_dim=8,
            linear_head_dim=8,
            linear_num_heads=4,
            layer_types=HYBRID,
            mlp_layer_types=["dense"] * 3,
        ),
        "granitemoehybrid": make(
            tf.GraniteMoeHybridConfig,
            **{**ATTENTION, "num_hidden_layers": 3},
            **SSD,
            mamba_chunk_size=8,
            layer_types=["mamba", "attention", "mamba"],
            num_local_experts=0,
            shared_intermediate_size=48,
        ),
        "nemotron_h": make(
            tf.NemotronHConfig,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            layers_block_type=["mamba", "attention", "mlp", "mamba"],
            mamba_num_heads=8,
            mamba_head_dim=8,
            ssm_state_size=8,
            n_groups=1,
            chunk_size=8,
            max_position_embeddings=512,
        ),
        "zamba2": make(
            tf.Zamba2Config,
            **{**ATTENTION, "num_hidden_layers": 3, "num_key_value_heads": 4},
            mamba_d_state=8,
            mamba_ngroups=1,
            n_mamba_heads=8,
            mamba_headdim=8,
            mamba_expand=2,
            chunk_size=8,
            num_mem_blocks=1,
            layers_block_type=["mamba", "hybrid", "mamba"],
            use_mem_rope=True,
        ),
        "lfm2": make(
            tf.Lfm2Config,
            **{**ATTENTION, "num_hidden_layers": 3},
            conv_L_cache=3,
            layer_types=["conv", "full_attention", "conv"],
            block_auto_adjust_ff_dim=False,
        ),
        "jamba": make(
            tf.JambaConfig,
            **{**ATTENTION, "num_hidden_layers": 4},
            num_experts=2,
            num_experts_per_tok=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=8,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        ),
        "bamba": make(
            tf.BambaConfig, **{**ATTENTION, "num_hidden_layers": 3}, **SSD, mamba_chunk_size=8, attn_layer_indices=[1]
        ),
        "rwkv": make(tf.RwkvConfig, hidden_size=32, num_hidden_layers=2, context_length=512, rescale_every=0),
    }


def _more_configs() -> dict[str, functools.partial]:
    """Near relatives of the families above, whose recurrent layers should be scored as theirs are."""
    make = functools.partial
    moe = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    return {
        "qwen3_5_moe_text": make(
            tf.Qwen3_5MoeTextConfig,
            **{**ATTENTION, "num_hidden_layers": 3},
            head_dim=8,
            **DELTA,
            layer_types=HYBRID,
            **moe,
        ),
        "lfm2_moe": make(
            tf.Lfm2MoeConfig,
            **{**ATTENTION, "num_hidden_layers": 3},
            conv_L_cache=3,
            layer_types=["conv", "full_attention", "conv"],
            num_dense_layers=1,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
        ),
        "lfm3": make(
            tf.Lfm3Config,
            **{**ATTENTION, "num_hidden_layers": 4},
            head_dim=8,
            conv_L_cache=7,
            sliding_window=6,
            layer_types=["conv", "sliding_attention", "conv", "full_attention"],
        ),
        "zamba": make(
            tf.ZambaConfig,
            **{**ATTENTION, "num_hidden_layers": 4, "num_key_value_heads": 4},
            layers_block_type=["mamba", "hybrid", "mamba", "mamba"],
            mamba_d_state=8,
            n_mamba_heads=2,
            mamba_dt_rank=4,
            attention_hidden_size=64,
            attention_head_dim=16,
            use_mamba_kernels=False,
        ),
    }


FAMILIES = list(_configs())
MORE = list(_more_configs())
RECURRENT = FAMILIES[FAMILIES.index("mamba") :]


@functools.cache
def tiny(family: str, seed: int = 0, vocab: int = VOCAB, scale: float = 8.0) -> PreTrainedModel:
    """A random model of the family whose laws are peaked enough that greedy decoding has no near ties, on `DEVICE`."""
    with torch.device("cpu"):
        torch.manual_seed(seed)
        config = {**_configs(), **_more_configs()}[family](**{**COMMON, "vocab_size": vocab})
        config.tie_word_embeddings = False
        model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            # default inits barely mix tokens; larger matrices make every layer matter to the next token
            if parameter.ndim >= 2 and "conv1d" not in name and not name.endswith("A_log"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
        head = model.get_output_embeddings()
        head.weight.mul_(scale / 2)
        model.generation_config.eos_token_id = None
    return model.to(DEVICE)
