"""The table of what we use of vLLM's objects is complete; ``tests/vllm/test_signatures.py`` compares it with a vLLM."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

LLM = "vllm.v1.engine.async_llm:AsyncLLM"
SCORER = "vllm.v1.engine.llm_engine:LLMEngine"
WORKER = "vllm.v1.worker.gpu_worker:Worker"
LAYERS, RELOADING = "vllm.model_executor.layers", "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo"
USED: Mapping[str, str] = {
    # Attributes, and calls as we write them. Most names are private or unstable.
    LLM: "dead_error, engine_core, errored, model_config, generate(0, 0, 0, lora_request=0), shutdown(timeout=0), "
    "await collective_rpc(0, args=0), await wake_up(0), await sleep(0, 0), await resume_generation(), "
    "await init_weight_transfer_engine(0), await start_weight_update(), await update_weights(0), "
    "await finish_weight_update(0), await add_lora(0), await remove_lora(0),",
    "vllm.v1.engine.core_client:AsyncMPClient": "await pause_scheduler_async(mode=0, clear_cache=0),",
    "vllm:AsyncEngineArgs": "enable_chunked_prefill, enable_prefix_caching, create_model_config(),",
    "vllm.config:ModelConfig": "architecture, dtype, has_inner_state, max_model_len, model, get_vocab_size(),",
    "vllm.config:ParallelConfig": "rank, tensor_parallel_size,",
    "vllm.config:VllmConfig": "additional_config, parallel_config,",
    SCORER: "model_config, add_request(0, 0, 0), has_unfinished_requests(), step(),",
    "vllm.outputs:RequestOutput": "outputs,",
    "vllm.outputs:CompletionOutput": "finish_reason, logprobs, token_ids, weight_versions,",
    "vllm.outputs:WeightVersionSpan": "end, start, version,",
    "vllm.outputs:PoolingRequestOutput": "outputs, request_id,",
    "vllm.outputs:PoolingOutput": "data,",
    "vllm.logprobs:FlatLogprobs": "end_indices, logprobs, start_indices, token_ids,",
    "vllm.v1.metrics.stats:IterationStats": "num_generation_tokens,",
    "vllm.v1.metrics.stats:SchedulerStats": "kv_cache_usage, num_running_reqs,",
    # In the worker: what we read, and what vLLM calls for our requests.
    WORKER: "model_runner, use_v2_model_runner, get_model(), sleep(level=0), wake_up(tags=0), "
    "init_weight_transfer_engine(init_info=0), update_weights(update_info=0),",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "lora_manager, get_model(),",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": "lora_manager, get_model(),",
    "vllm.lora.worker_manager:WorkerLoRAManager": "_adapter_manager,",
    "vllm.lora.model_manager:LoRAModelManager": "get_adapter(0),",
    "vllm.lora.lora_model:LoRAModel": "loras,",
    "vllm.lora.lora_weights:LoRALayerWeights": "lora_a, lora_b,",
    "vllm.lora.peft_helper:PEFTHelper": "r, lora_alpha, use_rslora, target_modules, bias,",  # adapter_config.json
    "vllm.distributed.weight_transfer.base:WeightTransferEngine": "device, model, model_config, vllm_config, "
    "parse_update_info(0),",
    "vllm.model_executor.models.llama:LlamaForCausalLM": "load_weights(0),",
    f"{LAYERS}.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod": "moe_kernel,",
    f"{LAYERS}.linear:RowParallelLinear": "input_size_per_partition, quant_method,",
    f"{LAYERS}.linear:UnquantizedLinearMethod": "apply(0, 0, 0), process_weights_after_loading(0),",
    RELOADING: "loaded_weights, can_load(),",
}
TEXTS = [path.read_text(encoding="utf-8") for path in (Path(__file__).parents[2] / "async_rl").rglob("*.py")]
USERS = [text for text in TEXTS if re.search(r"^\s*from vllm", text, re.MULTILINE)]
OTHERS = {
    *("AnnAssign", "ClassDef", "parent_process", "sentinel", "submodule_search_locations"),  # Python's
    *("DELTA", "from_engine_args", "register_engine"),  # of names that we import
}


def test_what_only_files_that_import_vllm_read_is_in_the_table_of_vllms_names():
    assert len(USERS) == 5
    nodes = [node for text in USERS for node in ast.walk(ast.parse(text))]
    made = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    made |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {name for text in USERS for name in re.findall(r'(?:getattr|hasattr)\(\w+, "(\w+)"', text)}
    elsewhere = {name for text in TEXTS if text not in USERS for name in re.findall(r"\w+", text)}
    assert read - made - elsewhere - set(re.findall(r"\w+", " ".join(USED.values()))) == OTHERS
