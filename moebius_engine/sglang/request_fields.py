"""Every attribute of SGLang 0.5.12's Req, and what a switch does with it.

tests/engine/test_request_fields.py compares these sets with a real Req, so a new upstream attribute fails there and,
at run time, refuses the switch (requests.check_known).
"""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Travels with the request to a rank that does not have it yet.
CARRIED = _names(
    """
    rid origin_input_text origin_input_ids_unpadded origin_input_ids output_ids http_worker_ipc sampling_params
    return_hidden_states hidden_states extra_key routing_key priority stream eos_token_ids vocab_size
    kv_committed_len kv_allocated_len kv_committed_freed kv_overallocated_freed extend_batch_idx
    decode_batch_idx require_reasoning _is_reasoning_over reasoning_tokens finished_reason finished_len
    finished_output to_finish surr_offset read_offset decoded_text surr_and_decode_ids cur_decode_ids_len
    send_token_offset send_decode_id_offset send_output_token_logprobs_offset extend_input_len
    extend_logprob_start_len is_chunked is_retracted retracted_stain retraction_count retraction_mb_id
    return_logprob logprob_start_len top_logprobs_num token_ids_logprob temp_scaled_logprobs
    top_p_normalized_logprobs input_logprob_sent input_token_logprobs_val input_token_logprobs_idx
    input_top_logprobs_val input_top_logprobs_idx input_token_ids_logprobs_val input_token_ids_logprobs_idx
    input_token_logprobs temp_input_top_logprobs_val temp_input_top_logprobs_idx
    temp_input_token_ids_logprobs_val temp_input_token_ids_logprobs_idx output_token_logprobs_val
    output_token_logprobs_idx output_top_logprobs_val output_top_logprobs_idx output_token_ids_logprobs_val
    output_token_ids_logprobs_idx cached_tokens already_computed cached_tokens_device cached_tokens_host
    cached_tokens_storage _cache_breakdown_computed has_log_time_stats penalty_token cache_protected_len
    """
)

# Made anew where the request lands: pool slots, tree nodes, grammars, what the scheduler computes before each use.
REBUILT = _names(
    """
    req_pool_idx prefix_indices last_node last_host_node best_match_node fill_ids host_hit_length
    storage_hit_length tokenizer metrics_collector time_stats grammar grammar_key grammar_wait_ct
    """
)

# Belongs to features that SwitchingEngine refuses at start or at the door, so it always has its first value.
UNUSED = _names(
    """
    session input_embeds positional_embed_overrides multi_item_delimiter_indices token_type_ids
    custom_logit_processor lora_id multimodal_inputs swa_evicted_seqlen swa_uuid_for_lock
    swa_prefix_lock_released mamba_pool_idx mamba_ping_pong_track_buffer mamba_next_track_idx
    mamba_last_track_seqlen mamba_branching_seqlen hidden_states_tensor output_topk_p output_topk_index
    return_routed_experts routed_experts_start_len routed_experts return_indexer_topk indexer_topk
    customized_info embedding dimensions return_pooled_hidden_states pooled_hidden_state spec_verify_ct
    spec_num_correct_drafts spec_correct_drafts_histogram bootstrap_host bootstrap_port bootstrap_room
    skip_radix_cache_insert disagg_kv_sender routed_dp_rank disagg_prefill_dp_rank start_send_idx tmp_end_idx
    metadata_buffer_index dllm_phase dllm_block_offset dllm_config hisparse_staging
    """
)

# Set by SGLang or by a switch only when first needed; part of CARRIED.
LAZY = _names("surr_and_decode_ids cur_decode_ids_len penalty_token")

KNOWN = CARRIED | REBUILT | UNUSED
