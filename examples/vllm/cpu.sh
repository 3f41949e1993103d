#!/usr/bin/env bash
# One prefill and one decode server of vLLM (CPU) on this host, and Baton's router on port 8000. Ctrl-C ends all.
set -euo pipefail
MODEL=${1:-models/baton-demo-llama}
DRAFT=${2:-models/baton-demo-eagle3}
KEY=${TICKET_KEY:-$PWD/ticket.key}
PYTHON=${PYTHON:-.venv-vllm/bin/python} # made by `make test-vllm`
export VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 PYTHONPATH=src

[ -e "$KEY" ] || (umask 077 && head -c 32 /dev/urandom > "$KEY")
trap 'kill $(jobs -p) 2> /dev/null; wait' EXIT

engine() { # name role port
    "$PYTHON" -m vllm.entrypoints.openai.api_server --model "$MODEL" --served-model-name demo --port "$3" \
        --host 127.0.0.1 --enforce-eager --speculative-config \
        '{"method": "eagle3", "model": "'"$DRAFT"'", "num_speculative_tokens": 3}' \
        --kv-transfer-config '{"kv_connector": "BatonConnector", "kv_connector_module_path": "baton.vllm",
            "kv_role": "'"$2"'", "engine_id": "'"$1"'", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"ticket_key_file": "'"$KEY"'"}}' &
}
engine P kv_producer 8101
engine D kv_consumer 8102
baton router --engine vllm --prefill http://127.0.0.1:8101 --decode http://127.0.0.1:8102 \
    --ticket-key-file "$KEY" --tokenizer "$MODEL" --port 8000
