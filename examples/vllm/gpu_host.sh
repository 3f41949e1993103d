#!/usr/bin/env bash
# vLLM on a host with two GPUs: a prefill server on the first, a decode server on the second, Baton's router on port 8000.
# With one GPU, both on it: GPUS="0 0" gpu_host.sh MODEL --gpu-memory-utilization 0.45
# In vLLM's own environment:  pip install nixl baton-serve
# Then:                       gpu_host.sh MODEL [flags for both servers, such as --speculative-config '...']
set -euo pipefail
MODEL=$1
shift
read -r FIRST SECOND <<< "${GPUS:-0 1}"
KEYS=${KEYS:-$PWD/keys}

baton keys --output "$KEYS" --engines P,D
trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT

engine() { # gpu name role port flags...
    CUDA_VISIBLE_DEVICES=$1 vllm serve "$MODEL" --served-model-name model --host 127.0.0.1 --port "$4" \
        --kv-transfer-config '{"kv_connector": "BatonConnector", "kv_connector_module_path": "baton.vllm",
            "kv_role": "'"$3"'", "engine_id": "'"$2"'", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"keys": "'"$KEYS"'"}}' "${@:5}" &
}
engine "$FIRST" P kv_producer 8101 "$@"
engine "$SECOND" D kv_consumer 8102 "$@"
for port in 8101 8102; do
    until curl -sf "http://127.0.0.1:$port/health"; do
        [ "$(jobs -rp | wc -l)" = 2 ] # a server that did not start has said why
        sleep 1
    done
done
baton router --engine vllm --prefill http://127.0.0.1:8101 --decode http://127.0.0.1:8102 \
    --keys "$KEYS" --tokenizer "$MODEL" --port 8000
