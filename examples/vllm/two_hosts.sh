#!/usr/bin/env bash
# The same over two hosts. First, once, on either of them, and then copied to both (each needs its own secret only):
#   baton keys --output keys --engines P,D
# On the prefill host:  two_hosts.sh prefill MODEL 10.0.0.1
# On the decode host:   two_hosts.sh decode MODEL 10.0.0.2
# Router, anywhere:     two_hosts.sh router MODEL 10.0.0.1 10.0.0.2
set -euo pipefail
ROLE=$1 MODEL=$2 HOST=$3
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-8}

engine() { # name role
    exec python -m vllm.entrypoints.openai.api_server --model "$MODEL" --served-model-name model --host "$HOST" \
        --port 8100 --kv-transfer-config '{"kv_connector": "BatonConnector", "kv_connector_module_path": "baton.vllm",
            "kv_role": "'"$2"'", "engine_id": "'"$1"'", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"keys": "keys", "control_bind": "tcp://'"$HOST"':7100",
                "kv_transport": "nixl://?host='"$HOST"'"}}'
}
case $ROLE in
    prefill) engine P kv_producer ;;
    decode) engine D kv_consumer ;;
    router) exec baton router --engine vllm --prefill "http://$HOST:8100" --decode "http://$4:8100" \
        --keys keys --tokenizer "$MODEL" ;;
esac
