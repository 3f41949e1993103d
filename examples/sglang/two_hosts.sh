#!/usr/bin/env bash
# SGLang on two hosts with GPUs: prefill on one, decode on the other. Not run on GPUs yet. On both, in SGLang's environment:
#   pip install nixl baton-serve
# Keys, once; then copy `keys` to both hosts, without the other one's secret (keys/secret/NAME.key):
#   baton keys --output keys --engines P,D
# On the prefill host:  two_hosts.sh prefill MODEL 10.0.0.1 [flags for SGLang]
# On the decode host:   two_hosts.sh decode MODEL 10.0.0.2 [flags for SGLang]
# Router, anywhere:     two_hosts.sh router MODEL 10.0.0.1 10.0.0.2
set -euo pipefail
ROLE=$1 MODEL=$2 HOST=$3
shift 3

engine() { # name role flags...
    export SGLANG_HOST_IP=$HOST # without it SGLang needs a route to the internet
    export BATON_SGLANG_CONFIG='{"engine_id": "'"$1"'", "keys": "keys", "control_bind": "tcp://'"$HOST"':7100",
        "kv_transport": "nixl://?host='"$HOST"'"}'
    exec sglang serve --model-path "$MODEL" --host "$HOST" --port 30000 --disaggregation-mode "$2" \
        --disaggregation-transfer-backend baton "${@:3}"
}
case $ROLE in
    prefill) engine P prefill "$@" ;;
    decode) engine D decode "$@" ;;
    router) exec baton router --engine sglang --prefill "http://$HOST:30000" --decode "http://$1:30000" \
        --keys keys --tokenizer "$MODEL" ;;
    *) echo "prefill, decode or router, not $ROLE" >&2 && exit 2 ;;
esac
