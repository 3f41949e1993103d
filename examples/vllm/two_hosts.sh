#!/usr/bin/env bash
# vLLM on two hosts, with GPUs or without: prefill on one, decode on the other. On both, in vLLM's environment:
#   pip install nixl baton-serve          (without GPUs: tools/install_vllm.py makes such an environment)
# Keys, once; then copy `keys` to both hosts, without the other one's secret (keys/secret/NAME.key):
#   baton keys --output keys --engines P,D
# On the prefill host:  two_hosts.sh prefill MODEL 10.0.0.1 [flags for vLLM]
# On the decode host:   two_hosts.sh decode MODEL 10.0.0.2 [flags for vLLM]
# Router, anywhere:     two_hosts.sh router MODEL 10.0.0.1 10.0.0.2
# KV goes over the network cards that UCX finds, RDMA where there is any; UCX_NET_DEVICES=mlx5_0:1 chooses one.
set -euo pipefail
ROLE=$1 MODEL=$2 HOST=$3
shift 3

engine() { # name role flags...
    exec python -m vllm.entrypoints.openai.api_server --model "$MODEL" --served-model-name model --host "$HOST" \
        --port 8100 --kv-transfer-config '{"kv_connector": "BatonConnector", "kv_connector_module_path": "baton.vllm",
            "kv_role": "'"$2"'", "engine_id": "'"$1"'", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"keys": "keys", "control_bind": "tcp://'"$HOST"':7100",
                "kv_transport": "nixl://?host='"$HOST"'"}}' "${@:3}"
}
case $ROLE in
    prefill) engine P kv_producer "$@" ;;
    decode) engine D kv_consumer "$@" ;;
    router) exec baton router --engine vllm --prefill "http://$HOST:8100" --decode "http://$1:8100" \
        --keys keys --tokenizer "$MODEL" ;;
    *) echo "prefill, decode or router, not $ROLE" >&2 && exit 2 ;;
esac
